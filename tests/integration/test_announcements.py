"""Nothing of a run is silent for long: each stretch is announced, goes on in beats, and ends with its result.

Order is asserted, never seconds: how long a stretch takes is the machine's business.
"""

import itertools
import json
import os
import pkgutil
import re
import select
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import launch
from gpt2lab.commands import entry
from gpt2lab.planner.hardware import NoSourceError
from gpt2lab.runs import console
from tiny import flags_of, parse, pretrain, write_inputs, write_items

# What is announced, and how the line begins that ends the silence.
STRETCHES = {
    r"step \d+/4 \| evaluating [\d,]+ tokens": r"step \d+/4 \| val loss",
    r"step \d+/4 \| answering 12 items of HellaSwag": r"step \d+/4 \| HellaSwag",
    r"step \d+/4 \| writing a sample of 2 tokens": r"step \d+/4 \| sample:",
    r"compiling the step(, about .* unless its code is cached)?": r"(compiled|traced) in ",
}


def assert_announced(lines: list[str], stretches: dict[str, str]) -> None:
    """Each stretch ends with its own result, and until then only its beats are printed."""
    for begin, end in stretches.items():
        places = [at for at, line in enumerate(lines) if re.fullmatch(begin, line)]
        assert places, begin
        ends = [line for line in lines if re.match(end, line)]
        assert len(ends) == len(places), begin
        for at in places:
            after = at + 1
            beat = rf"{re.escape(lines[at])}: (.* of .* left|\d+ s so far)"
            while re.fullmatch(beat, lines[after]):
                after += 1
            assert re.match(end, lines[after]), lines[after]


@pytest.mark.slow
def test_each_measurement_is_announced(tmp_path):
    write_inputs(tmp_path, train=1003)
    done = launch.worked(launch.train_in_forks(flags_of(tmp_path, "r")))
    log = (tmp_path / "runs" / "r" / "log.txt").read_text()
    names = [line.split()[0] for line in done.stdout.splitlines()[:6]]
    assert names == ["run", "model", "data", "batch", "schedule", "forecast"]
    assert ("tokens/step" in done.stdout, "tokens/step" in log) == (False, True)
    again = launch.train_in_forks(flags_of(tmp_path, "verbose", "--verbose"))
    assert "tokens/step" in again.stdout
    measured = {begin: end for begin, end in STRETCHES.items() if "compiling" not in begin}
    for text in (done.stdout, log):
        assert_announced(text.splitlines(), measured)


@pytest.mark.slow
def test_compiling_is_announced(tmp_path):
    write_inputs(tmp_path, train=1003)
    done = launch.worked(launch.train_in_forks(flags_of(tmp_path, "r", "--compile=on")))
    assert_announced(done.stdout.splitlines(), STRETCHES)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    flags = flags_of(tmp_path, "ddp", "--compile=on")
    done = launch.train_in_forks(flags, **alone, MASTER_PORT="29533")
    assert "compiling for DDP" in done.stdout.splitlines(), done.stderr


# -- every command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two runs over a text, which differ in their seed, and items of HellaSwag."""
    folder = write_inputs(tmp_path_factory.mktemp("commands"), train=1003)
    (folder / "text.txt").write_text("Anna sees Otto.\n\n" * 500)
    for name in ("r_seed1", "r_seed2"):
        more = [f"--seed={name[-1]}", "--checkpoint_freq=2", "--hellaswag_freq=0"]
        pretrain(parse(flags_of(folder, name, *more)))
    return folder


SPLITTING, CHECKING = "splitting the gradient by sample", "writing and checking {folder}/export"
# A command of the pages, a function in which it may be for long, and what it says meanwhile.
LONG = {
    "evaluate r_seed1": ("evaluation.validation.Validation._measure_windows", "validation loss"),
    "evaluate r_seed1 --hellaswag": ("evaluation.hellaswag.score", "HellaSwag"),
    "sample r_seed1 --prompt a --num_samples 2": ("model.gpt.GPT.extend", "drawing 2 texts"),
    "replay r_seed1 --steps 3:4": ("lab.replay.launch_step", "replaying"),
    "replay r_seed1 --steps 3": ("lab.replay.build", "loading the checkpoint of step 2"),
    "why-spike r_seed1 --step 3": ("lab.why_spike.contributions", SPLITTING),
    "bisect r_seed1 r_seed2": ("lab.bisect.bisect", "working"),
    "compare r_seed1 r_seed2": ("lab.compare.find_results", "working"),
    "report r_seed1": ("report.page.render", "working"),
    "export r_seed1 --out {folder}/export": ("interop.export.write_card", CHECKING),
    "prepare {folder}/text.txt --out {folder}/made": ("data.prepare.pipeline.prepare", "working"),
    "estimate --measure": ("planner.measuring._run_for", "training"),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", LONG)
def test_every_command_says_what_it_does_while_it_takes_long(command, folder, monkeypatch):
    """Each function ends only when its command has said so: without that, the test waits in vain."""
    place, expected = LONG[command]
    expected = expected.format(folder=folder)
    said: list[str] = []
    monkeypatch.setattr(console, "BEAT_SECONDS", 0.0)
    monkeypatch.setattr(entry, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(console, "say", lambda text="": said.append(text))
    plain = pkgutil.resolve_name(f"gpt2lab.{place}")

    def slow(*args: object, **named: object) -> object:
        begun, deadline = len(said), time.monotonic() + launch.HANG_SECONDS
        while not any(line.startswith(f"{expected}: ") for line in said[begun:]):
            assert time.monotonic() < deadline, said
            time.sleep(0.01)
        if place.startswith("planner"):
            raise NoSourceError("measured nothing")
        return plain(*args, **named)

    monkeypatch.setattr(f"gpt2lab.{place}", slow)
    words = command.format(folder=folder).split()
    if words[0] not in ("prepare", "estimate"):
        words += ["--checkpoint_dir", str(folder / "runs")]
    done = launch.call(words[0], *words[1:])
    assert done.returncode in (0, 1, 4), done.stderr
    assert any(line.startswith(f"{expected}: ") for line in said)


@pytest.mark.slow
def test_no_silence_is_longer_than_five_seconds(folder, tmp_path):
    """By the program's own clock: where it gets a tenth of a core, its seconds are ten times as long."""
    items = write_items(tmp_path / "items.jsonl", count=600)
    words = ["r_seed1", "--checkpoint_dir", str(folder / "runs"), "--json", "--hellaswag"]
    command = [*launch.words_of("evaluate"), *words, f"--hellaswag_path={items}"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    began, moments = time.monotonic(), [time.monotonic()]
    with subprocess.Popen(command, env=launch.environment(), **pipes) as process:
        said = {stream.fileno(): b"" for stream in (process.stdout, process.stderr)}
        left = list(said)
        while left:
            for number in select.select(left, [], [])[0]:
                if part := os.read(number, 65536):
                    moments.append(time.monotonic())
                    said[number] += part
                else:
                    left.remove(number)
        _, code, used = os.wait4(process.pid, 0)
        process.returncode = code
    share = (used.ru_utime + used.ru_stime) / (time.monotonic() - began)
    out, err = (text.decode() for text in said.values())
    assert (code, json.loads(out)["hellaswag"]["n"]) == (0, 600), err
    assert re.search(r"^HellaSwag: [\d,]+ of [\d,]+ batches, .* left$", err, re.MULTILINE)
    assert max(b - a for a, b in itertools.pairwise(moments)) < 5 / min(1.0, share)
