"""Tiny runs to serve, and the server over them: in a thread of the tests, or as the program that users start."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import launch
import tiny
from gpt2lab.evaluation.completion import Completer, SamplingParams
from gpt2lab.finetuning.recipe import FINETUNING
from tiny import parse, pretrain

CONTEXT = 64


def train(folder: Path) -> Path:
    """Train `base` on text and fine-tune it to `tuned`, some steps each; return the folder of the runs."""
    tiny.write_shards(folder / "data", train=(2003,), val=(650,))
    few = ["--total_batch_size=128", "--max_steps=2", "--eval_freq=0"]
    few += [f"--context_length={CONTEXT}"]
    flags = [flag for flag in tiny.flags_of(folder, "base") if "hellaswag" not in flag]
    pretrain(parse([*flags, *few]))
    pairs = [{"instruction": f"Count {n}", "output": f"{n} {n + 1}"} for n in range(24)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    flags = [f"--init_from={folder / 'runs' / 'base'}", f"--instructions={folder / 'pairs.jsonl'}"]
    flags += [f"--checkpoint_dir={folder / 'runs'}", "--run_name=tuned", "--max_steps=2"]
    flags += [f"--total_batch_size={4 * CONTEXT}", "--mini_batch_size=2", "--eval_freq=0"]
    flags += ["--device=cpu", "--dtype=fp32", "--compile=off", "--sample_tokens=2"]
    pretrain(parse(flags, "finetune"), recipe=FINETUNING)
    return folder / "runs"


def completer(runs: Path, name: str) -> Completer:
    return Completer(name, checkpoint_dir=runs, device="cpu", dtype="fp32", style=SamplingParams())


@contextlib.contextmanager
def in_thread(
    model: Completer, *, token: str | None = None, max_waiting: int = 64
) -> Iterator[int]:
    """Serve a model in a thread; yield the port."""
    import socket

    from gpt2lab.serving.app import build_app
    from gpt2lab.serving.connections import server_of

    name = model.target.name
    app, engine = build_app(model, name, token=token, host="127.0.0.1", max_waiting=max_waiting)
    server = server_of(app, max_waiting)
    server.config.timeout_graceful_shutdown = 1
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
            engine.close()


def ask(
    port: int, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, dict[str, str], str]:
    """Send one request, a body as JSON unless it is bytes; return status, headers and text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=launch.HANG_SECONDS)
    with contextlib.closing(connection):
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read().decode()


def answer(port: int, path: str, body: Any) -> Any:
    status, _, text = ask(port, "POST", path, body)
    assert status == 200, text
    return json.loads(text)


def events(text: str) -> list[dict[str, Any]]:
    """Return the JSON of a stream, which must end as OpenAI's do."""
    lines = [part.removeprefix("data: ") for part in text.split("\n\n")]
    assert lines[-2:] == ["[DONE]", ""]
    return [json.loads(line) for line in lines[:-2]]


@contextlib.contextmanager
def program(*words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `gpt2lab serve` on a free port; yield the process and its address; Ctrl+C ends it with code 0."""
    command = [*launch.words_of("serve"), *words, "--port=0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=launch.environment(**environment), **pipes)
    try:
        line = process.stdout.readline()
        found = re.search(r"http://\S+(?=/ in a browser)", line)
        assert found is not None, (line, process.communicate()[1])
        yield process, found[0]
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=launch.HANG_SECONDS)
        assert (process.returncode, launch.without_progress(error)) == (0, ""), error
    finally:
        process.kill()
        process.wait()


def wait_until(holds: Any) -> None:
    """Wait for a state that another thread brings about."""
    deadline = time.monotonic() + launch.HANG_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
