"""What a run writes: metrics.jsonl, its readers, and log.txt."""

import json
import math
import time
from pathlib import Path

import pytest

import launch
from gpt2lab.runs import history, summary
from gpt2lab.runs.logger import MetricsLogger
from plain_log import current_events, log_of, read_events
from tiny import parse, pretrain


def lines_of(run_dir: Path) -> list[dict]:
    text = (run_dir / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    for line in lines:
        line.pop("crc", None)
    return lines


def test_every_line_tells_what_when_which_start_and_which_step(tmp_path):
    """A number that is not finite is null; bytes of a file's name that are no UTF-8 are half a surrogate pair."""
    before = time.time()
    logger = MetricsLogger(tmp_path, attempt=3)
    logger.event("eval", 7, val_loss=1.5, seconds=0.25)
    logger.warn("look out", 8)
    logger.event("step", 9, lr=0.5, mfu=None, loss=math.nan, high=math.inf, low=-math.inf)
    logger.say("run caf\udce9")
    logger.close()
    first, second, third = lines_of(tmp_path)
    times = [line.pop("time") for line in (first, second, third)]
    assert before <= times[0] <= times[1] <= times[2] <= time.time()
    assert first == {"event": "eval", "attempt": 3, "step": 7, "val_loss": 1.5, "seconds": 0.25}
    assert second == {"event": "warning", "attempt": 3, "step": 8, "message": "look out"}
    none = dict.fromkeys(("mfu", "loss", "high", "low"))
    assert third == {"event": "step", "attempt": 3, "step": 9, "lr": 0.5, **none}
    assert (tmp_path / "log.txt").read_text().endswith("\nrun caf\\udce9\n")


def event(kind: str, step: int, attempt: int = 1, **fields: object) -> dict:
    return {"event": kind, "time": 1.0, "attempt": attempt, "step": step, **fields}


def whole_line(step: int) -> bytes:
    return json.dumps(event("step", step)).encode() + b"\n"


def test_a_console_on_a_full_disk_is_written_again(tmp_path):
    """As in `python src/train.py > train.log`; what the disk had no room for is in log.txt, where it has."""
    code = (
        "import os, sys; from pathlib import Path; from gpt2lab.runs.logger import MetricsLogger\n"
        f"logger = MetricsLogger(Path({str(tmp_path)!r}), attempt=1)\n"
        "disk = os.dup(1); os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        "logger.say('one'); logger.say('two'); os.dup2(disk, 1); logger.say('three')\n"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1); logger.say('four'); logger.close()"
    )
    done = launch.python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("three\n")
    assert (tmp_path / "log.txt").read_text() == "one\ntwo\nthree\nfour\n"


@pytest.mark.parametrize("torn", [b'{"event": "st', b"\xff\xfe", b"{}", b"x" * 100, b"x" * 1000])
def test_line_torn_by_a_killed_writer_is_cut_when_the_file_is_opened(tmp_path, torn, monkeypatch):
    monkeypatch.setattr("gpt2lab.runs.logger._BLOCK", 100)  # which some are longer than
    assert read_events(tmp_path) == []  # of a run without a file of metrics
    (tmp_path / "metrics.jsonl").write_bytes(torn)
    MetricsLogger(tmp_path, attempt=1).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    whole = b"".join(whole_line(step) for step in (1, 2))
    (tmp_path / "metrics.jsonl").write_bytes(whole + torn)
    assert [event["step"] for event in read_events(tmp_path)] == [1, 2]
    logger = MetricsLogger(tmp_path, attempt=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    logger.event("step", 3)
    logger.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]


def test_a_complete_last_line_that_lacks_its_newline_is_kept(tmp_path):
    lines = b"".join(map(whole_line, (1, 2)))
    (tmp_path / "metrics.jsonl").write_bytes(lines[:-1])
    for events in (read_events(tmp_path), list(history.open_log(tmp_path).current_steps())):
        assert [event["step"] for event in events] == [1, 2]
    MetricsLogger(tmp_path, attempt=2).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines


def test_process_without_a_folder_writes_and_prints_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = MetricsLogger(None, attempt=1)
    logger.event("step", 1, loss=1.0)
    logger.say("hello")
    logger.warn("hello", 1)
    logger.close()
    assert (list(tmp_path.iterdir()), capsys.readouterr()) == ([], ("", ""))


def test_current_follows_the_line_that_the_newest_weights_took():
    events = [
        *[event("step", n, 1) for n in range(1, 8)],
        *(event("eval", 6, 1, val_loss=1.0), event("resume", 4, 2, from_step=4)),
        *(event("step", 5, 2), event("resume", 2, 3, from_step=2), event("step", 3, 3)),
        event("eval", 3, 3, val_loss=1.0),
    ]
    steps = current_events(events, "step")
    assert {n: kept["attempt"] for n, kept in steps.items()} == {1: 1, 2: 1, 3: 3}
    assert {n: kept["attempt"] for n, kept in current_events(events, "eval").items()} == {3: 3}
    log = log_of(events)
    attempts = dict(zip(log.numbers.tolist(), log.column("attempt").tolist(), strict=True))
    assert (attempts, log.current("eval")) == ({1: 1, 2: 1, 3: 3}, current_events(events, "eval"))
    assert (log.last_attempt, log_of([]).last_attempt) == (3, 0)


def test_a_run_that_goes_on_has_not_ended_and_a_save_stops_training_for_its_stall():
    whole = {"max_steps": 2, "world_size": 1}
    events = [event("begin", 0, **whole), event("done", 2, reason="completed")]
    assert log_of(events).has_ended
    assert not log_of([*events, event("begin", 2, 2, **whole | {"max_steps": 4})]).has_ended
    evals = [event("eval", step, val_loss=loss) for step, loss in ((0, 5.0), (1, 3.0), (2, 4.0))]
    said = str(summary._losses(log_of(evals)))
    assert "5.0000 at step 0 -> 4.0000 at step 2; best 3.0000 at step 1" in said
    by_two = log_of([event("begin", 0, max_steps=2, world_size=2)])
    assert " --gpus 2 " in summary.command_to_continue(Path("run"), by_two)
    saved = event("checkpoint", 2, seconds=9.0, stall_seconds=0.5)
    assert log_of([event("step", 1, step_seconds=1.0), saved]).spent_seconds() == 1.5
    # The speed of a run is that of its last start, without what compiles.
    rates = [(1, 900.0)] * 8 + [(2, rate) for rate in (1.0, 2.0, 50.0, 60.0, 70.0)]
    steps = [event("step", n, of, tokens_per_second=rate) for n, (of, rate) in enumerate(rates, 1)]
    assert (log_of(steps).typical_rate()[0], log_of(steps[:2]).typical_rate()[0]) == (60.0, 900.0)


@pytest.mark.parametrize("damaged", [b'{"event": oops', b"[1, 2]", b'{"event": "step"}', b""])
def test_damaged_line_inside_the_file_is_left_out_and_named(tmp_path, damaged, capsys):
    (tmp_path / "metrics.jsonl").write_bytes(whole_line(1) + damaged + b"\n" + whole_line(2))
    for _ in range(2):
        assert history.read_log(tmp_path).numbers.tolist() == [1, 2]
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {tmp_path / 'metrics.jsonl'} line 2: not ")
    assert said.count("\n") == 1, "once a process"
    assert f"gpt2lab runs repair-log {tmp_path}" in said
    assert [event["step"] for event in read_events(tmp_path)] == [1, 2]


def test_log_is_what_the_console_showed(tiny_flags, tmp_path, capsys):
    pretrain(parse([*tiny_flags, "--max_steps=3", "--log_freq=2", "--verbose"]))
    shown = capsys.readouterr()
    assert (tmp_path / "runs" / "tiny" / "log.txt").read_text() == shown.out
    assert "step 2/3 |" in shown.out
    assert shown.err == ""
