"""Shared fixtures: a tiny corpus of awkward shard sizes and the flags of a tiny model over it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loopback
from gpt2lab.training.stop import Signals
from launch import HANG_SECONDS, REPOSITORY, WORKERS, environment
from tiny import TINY, TRAIN_SHARDS, VAL_SHARDS, parse, pretrain, write_shards
from whole_run import LAST, Run

Calls = list[tuple[str, Path]]
MESSAGES = Path(__file__).with_name("golden") / "messages.json"
# pytest's folder of a test
TEMPORARY = re.compile(r"/[^\s']*/pytest-\d+/(?:popen-gw\d+/)?[^/\s:']+\d")
# What Python and numpy say in parentheses differs by their version; what we say there does not.
OF_OTHERS = re.compile(
    r"(not JSON|not readable as JSON|not a \.npy file|do not restore|invalid choice: '\w+')"
    r" \((?!nested|\S+ is not a finite|numpy's).*?\)(?=;|$| \(and)"
)

# Programs that the tests start would keep their compiled code in the user's own cache. torch has set a default by now.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/gpt2lab-tests-{os.getuid()}"

# Each has one thread, so that tests do not take the cores from each other.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell starts its background jobs with SIGINT ignored, `nohup` with SIGHUP; programs that the tests start would
# inherit that.
for number, plain in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, plain)

loopback.guard()
os.environ["HF_HUB_OFFLINE"] = "1"  # nor do programs that the tests start ask the Hugging Face Hub

# Bits depend on the number of threads, and torchrun gives each of its processes one.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory) -> Path:
    """Return a folder with three training shards and one for validation; treat as read-only."""
    folder = tmp_path_factory.mktemp("data") / "tiny"
    return write_shards(folder, train=TRAIN_SHARDS, val=VAL_SHARDS)


@pytest.fixture
def tiny_flags(tiny_data, tmp_path) -> list[str]:
    """Return the command line of a run that takes milliseconds a step: 2 layers, 32 wide, T = 16, S = 8."""
    return [
        *(*TINY, "--log_freq=1000", "--run_name=tiny"),
        *(f"--data_dir={tiny_data}", f"--checkpoint_dir={tmp_path / 'runs'}"),
    ]


@pytest.fixture(scope="session")
def prepared_once(tmp_path_factory) -> Path:
    """Prepare a few dozen short documents; treat as read-only."""
    import corpora  # needs tqdm, which the tests of a GPU do without

    folder = tmp_path_factory.mktemp("prepared")
    source = corpora.write_jsonl(folder / "tiny.jsonl", corpora.TEXTS)
    corpora.run_prepare(source, folder / "tiny", val_tokens=100)
    return folder / "tiny"


@pytest.fixture
def prepared(prepared_once, tmp_path) -> Path:
    """Return a copy of them to spoil."""
    return Path(shutil.copytree(prepared_once, tmp_path / "prepared"))


@pytest.fixture
def run(request, tiny_data, tmp_path) -> Run:
    """Return a tiny run that has not begun, with the flags in its module's RUN."""
    return Run(tiny_data, tmp_path, *getattr(request.module, "RUN", ()))


@pytest.fixture(scope="session")
def tiny_run(tiny_data, tmp_path_factory) -> Callable[..., Run]:
    """Return a function that trains a tiny run in a new folder: `tiny_run(max_steps=5, world=2).events("step")`.

    Without settings the run has not begun; `data` names other data, `flags` what is no setting.
    """

    def train(*flags: str, data: Path = tiny_data, world: int = 1, **settings: object) -> Run:
        run = Run(data, tmp_path_factory.mktemp("run"), *flags, **settings)
        if settings:
            run.train(world=world)
        return run

    return train


@pytest.fixture(scope="session")
def straight(tiny_run) -> Run:
    """Return a run of 26 steps, into the second epoch; treat as read-only."""
    return tiny_run(max_steps=LAST, eval_freq=4, checkpoint_freq=5, log_freq=10)


@pytest.fixture(scope="session")
def stopped_and_resumed(tiny_data, tmp_path_factory) -> Path:
    """Return a run of 12 steps that was stopped after 7 and resumed from step 4 to its end; treat as read-only."""
    runs = tmp_path_factory.mktemp("runs")
    flags = [*TINY, "--n_layer=1", "--n_embd=16", "--total_batch_size=64", "--run_name=r"]
    flags += [f"--data_dir={tiny_data}", f"--checkpoint_dir={runs}"]
    flags += ["--max_steps=12", "--eval_freq=4", "--checkpoint_freq=4"]
    pretrain(parse([*flags, "--stop_after_steps=7"]))
    pretrain(parse([*flags, "--resume=4"]))
    return runs / "r"


@pytest.fixture
def run_dir(stopped_and_resumed, tmp_path) -> Path:
    """Return a copy of it to spoil."""
    return Path(shutil.copytree(stopped_and_resumed, tmp_path / "runs" / "r"))


@pytest.fixture
def counts_signals(monkeypatch) -> None:
    """Let a raised signal be counted before the next line: a thread counts it, and a step takes milliseconds."""
    raise_signal, count, counted = signal.raise_signal, Signals._count, threading.Event()

    def count_and_tell(self: Signals, number: int) -> None:
        count(self, number)
        counted.set()

    def raise_and_wait(number: int) -> None:
        counted.clear()
        raise_signal(number)
        assert counted.wait(60)

    monkeypatch.setattr(Signals, "_count", count_and_tell)
    monkeypatch.setattr(signal, "raise_signal", raise_and_wait)


@pytest.fixture
def listen(monkeypatch) -> Callable[..., Calls]:
    """Return a function that has flushes, renames and deletions of folders told before they happen, and noted."""

    def begin(hear: Callable[[str, Path], None] = lambda name, path: None) -> Calls:
        calls: Calls = []
        real: dict[str, Callable[..., Any]] = {"fsync": os.fsync, "rename": os.rename}
        real |= {"replace": os.replace, "rmtree": shutil.rmtree}

        def told(name: str) -> Callable[..., Any]:
            def call(what: Any, *more: Any, **options: Any) -> Any:
                path = Path(os.readlink(f"/proc/self/fd/{what}") if name == "fsync" else what)
                calls.append((name, Path(more[0]) if name in ("rename", "replace") else path))
                hear(*calls[-1])
                return real[name](what, *more, **options)

            return call

        for name in ("fsync", "rename", "replace"):
            monkeypatch.setattr(os, name, told(name))
        monkeypatch.setattr(shutil, "rmtree", told("rmtree"))
        return calls

    return begin


@pytest.fixture
def start_cluster() -> Iterator[Callable[..., tuple[str, int]]]:
    """Start a Ray cluster with FAULT set; return its address and the process of its second node."""
    started = []

    def start(*before: str, fault: str) -> tuple[str, int]:
        command = [sys.executable, str(WORKERS / "ray_cluster.py"), *before]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, text=True, env=environment(FAULT=fault), **pipes)
        started.append(process)
        address, node = (process.stdout.readline().strip() for _ in range(2))
        return address, int(node)

    yield start
    for process in started:
        process.communicate("", timeout=HANG_SECONDS)


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory) -> None:
    """Keep what runs note for their user, such as a mirror that was typed, away from the real one's."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def _stays_on_this_machine() -> Iterator[None]:
    """Fail a test that tried to connect elsewhere, though what tried it swallowed the error."""
    loopback.refused.clear()
    yield
    assert loopback.refused == [], "connections beyond loopback"


@pytest.fixture
def wording(request: pytest.FixtureRequest) -> Callable[[object], bool]:
    """Return a function that compares an error, or its line, with its recording: `raises(E, check=wording)`.

    The lines stand in tests/golden/messages.json; `UPDATE_GOLDEN=1 pytest -n 0 THE_TEST` records them.
    """

    def check(error: object) -> bool:
        text = str(error).removesuffix("\n").replace(f"{REPOSITORY}/", "")
        line = OF_OTHERS.sub(r"\1", TEMPORARY.sub("FOLDER", text))
        name = request.node.name
        assert "\n" not in line
        known = json.loads(MESSAGES.read_text())
        if os.environ.get("UPDATE_GOLDEN") == "1":
            known[name] = line
            MESSAGES.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        assert line == known.get(name)
        return True

    return check
