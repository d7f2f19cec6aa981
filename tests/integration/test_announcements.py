"""Nothing of a run is silent for long: each stretch is announced, goes on in beats, and ends with its result.

Order is asserted, never seconds: how long a stretch takes is the machine's business.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest

import launch
from launch import TRAIN
from tiny import flags_of, write_items, write_shards
from whole_run import Run

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
            while re.fullmatch(rf"{re.escape(lines[at])}: \d+ s so far", lines[after]):
                after += 1
            assert re.match(end, lines[after]), lines[after]


def test_each_measurement_is_announced(tmp_path):
    write_shards(tmp_path / "data", train=(1003,), val=(650,))
    write_items(tmp_path / "items.jsonl")
    done = launch.train_in_forks(flags_of(tmp_path, "r"))
    assert done.returncode == 0, done.stderr
    measured = {begin: end for begin, end in STRETCHES.items() if "compiling" not in begin}
    for text in (done.stdout, (tmp_path / "runs" / "r" / "log.txt").read_text()):
        assert_announced(text.splitlines(), measured)


@pytest.mark.slow
def test_compiling_is_announced(tmp_path):
    write_shards(tmp_path / "data", train=(1003,), val=(650,))
    write_items(tmp_path / "items.jsonl")
    done = launch.train(flags_of(tmp_path, "r", "--compile=on"))
    assert done.returncode == 0, done.stderr
    assert_announced(done.stdout.splitlines(), STRETCHES)


def test_the_first_ctrl_c_is_answered(tiny_data, tmp_path):
    run = Run(tiny_data, tmp_path)
    process = subprocess.Popen(
        [sys.executable, str(TRAIN), *run.flags, "--max_steps=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=launch.environment(),
    )
    launch.wait_for_step(process, run.path, 3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=launch.HANG_SECONDS)
    assert (process.returncode, err) == (0, "")
    lines = out.splitlines()
    (line,) = [line for line in lines if line.endswith("; press twice more to abort")]
    assert re.match(r"(finishing|stopping after) (the checkpoint of )?step \d+", line)
    assert any(line.startswith("stopped by SIGINT after step") for line in lines)
    assert json.loads((run.path / "status.json").read_text())["state"] == "stopped"


def test_a_complete_run_ends_with_the_commands_that_people_want_next(tmp_path):
    write_shards(tmp_path / "data", train=(1003,), val=(650,))
    write_items(tmp_path / "items.jsonl")
    done = launch.train_in_forks(flags_of(tmp_path, "r"))
    *_, title, sample, report, tune = done.stdout.splitlines()
    runs = tmp_path / "runs"
    assert title == "  next"
    assert sample.endswith(f"gpt2lab sample r --interactive --checkpoint_dir {runs}")
    assert report.endswith(f"gpt2lab report r --checkpoint_dir {runs}")
    finetune, chat = tune.split(" && ")
    assert "gpt2lab finetune --init_from r --instructions demo --run_name r_chat" in finetune
    assert chat.endswith(f"gpt2lab chat r_chat --checkpoint_dir {runs}")
    words = ["--prompt=a", "--max_new_tokens=1", f"--checkpoint_dir={runs}"]
    answer = launch.call("sample.py", "r", *words)
    assert answer.returncode == 0, answer.stderr
