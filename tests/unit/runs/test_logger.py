"""Events in, files out: metrics.jsonl as the truth, its readers, the log, the TensorBoard mirror."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

import launch
from ecosystem import works_with
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import find_problems, override
from gpt2lab.errors import ConfigError
from gpt2lab.runs import history
from gpt2lab.runs.logger import MetricsLogger
from gpt2lab.training.run_log import Histograms
from tiny import parse, pretrain
from whole_run import SCALARS

# The run's lock file is left for the interpreter to close; the warning says nothing about what is tested here.


def lines_of(run_dir: Path) -> list[dict]:
    text = (run_dir / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


# -- metrics.jsonl -----------------------------------------------------------------------------------------------


def test_every_line_tells_what_when_which_start_and_which_step(tmp_path) -> None:
    before = time.time()
    logger = MetricsLogger(tmp_path, attempt=3)
    logger.event("eval", 7, val_loss=1.5, seconds=0.25)
    logger.warn("look out", 8)
    logger.close()
    first, second = lines_of(tmp_path)
    assert before <= first.pop("time") <= second.pop("time") <= time.time()
    assert first == {"event": "eval", "attempt": 3, "step": 7, "val_loss": 1.5, "seconds": 0.25}
    assert second == {"event": "warning", "attempt": 3, "step": 8, "message": "look out"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_number_that_is_not_finite_becomes_null(tmp_path, bad) -> None:
    logger = MetricsLogger(tmp_path, attempt=1)
    logger.event("step", 1, loss=bad, lr=0.5, mfu=None)
    logger.close()
    (line,) = lines_of(tmp_path)
    assert (line["loss"], line["lr"], line["mfu"]) == (None, 0.5, None)


def test_event_is_on_the_disk_before_the_next_begins(tmp_path) -> None:
    logger = MetricsLogger(tmp_path, attempt=1)
    for step in (1, 2, 3):
        logger.event("step", step)
        assert [line["step"] for line in lines_of(tmp_path)] == list(range(1, step + 1))
    logger.close()


def whole_line(step: int) -> bytes:
    line = {"event": "step", "time": 1.0, "attempt": 1, "step": step}
    return json.dumps(line).encode() + b"\n"


def test_a_console_on_a_full_disk_is_written_again(tmp_path) -> None:
    """As in `python src/train.py > train.log`; what the disk had no room for is in log.txt, where it has."""
    code = (
        "import os, sys; from pathlib import Path; from gpt2lab.runs.logger import MetricsLogger\n"
        f"logger = MetricsLogger(Path({str(tmp_path)!r}), attempt=1)\n"
        "disk = os.dup(1); os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        "logger.say('one'); logger.say('two'); os.dup2(disk, 1); logger.say('three')\n"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1); logger.say('four'); logger.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(launch.REPOSITORY / "src")},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("three\n")
    assert (tmp_path / "log.txt").read_text() == "one\ntwo\nthree\nfour\n"


def test_a_name_that_is_no_text_can_be_logged(tmp_path) -> None:
    """Names of files are bytes: what of them is not UTF-8 is half a surrogate pair in Python."""
    logger = MetricsLogger(tmp_path, attempt=1)
    logger.say("run caf\udce9")
    logger.close()
    assert (tmp_path / "log.txt").read_text() == "run caf\\udce9\n"


@pytest.mark.parametrize("torn", [b'{"event": "st', b"\xff\xfe", b"{}"])
def test_line_torn_by_a_killed_writer_is_cut_when_the_file_is_opened(tmp_path, torn) -> None:
    whole = b"".join(whole_line(step) for step in (1, 2))
    (tmp_path / "metrics.jsonl").write_bytes(whole + torn)
    assert [event["step"] for event in history.read_events(tmp_path)] == [1, 2]
    logger = MetricsLogger(tmp_path, attempt=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole
    logger.event("step", 3)
    logger.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]


def test_file_of_a_torn_line_alone_becomes_empty(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"event"')
    MetricsLogger(tmp_path, attempt=2).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_metrics_and_log_only_ever_grow(tmp_path, capsys) -> None:
    contents = {"metrics.jsonl": b"", "log.txt": b""}
    for attempt in (1, 2, 3):
        logger = MetricsLogger(tmp_path, attempt=attempt)
        logger.event("step", attempt)
        logger.say(f"attempt {attempt}")
        logger.close()
        for name, before in contents.items():
            after = (tmp_path / name).read_bytes()
            assert after.startswith(before)
            assert len(after) > len(before)
            contents[name] = after
    assert capsys.readouterr().out == contents["log.txt"].decode()


def test_process_without_a_folder_writes_and_prints_nothing(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    logger = MetricsLogger(None, attempt=1)
    logger.event("step", 1, loss=1.0)
    logger.say("hello")
    logger.warn("hello", 1)
    logger.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


# -- reading it back ---------------------------------------------------------------------------------------------


def event(kind: str, step: int, attempt: int = 1, **fields: object) -> dict:
    return {"event": kind, "time": 1.0, "attempt": attempt, "step": step, **fields}


def test_current_follows_the_line_that_the_newest_weights_took() -> None:
    events = [
        *[event("step", n, 1) for n in range(1, 8)],
        event("eval", 6, 1, val_loss=1.0),
        event("resume", 4, 2, from_step=4),
        event("step", 5, 2),
        event("resume", 2, 3, from_step=2),
        event("step", 3, 3),
        event("step", 4, 3),
        event("eval", 4, 3, val_loss=1.0),
    ]
    steps = history.current(events, "step")
    assert {n: kept["attempt"] for n, kept in steps.items()} == {1: 1, 2: 1, 3: 3, 4: 3}
    assert {n: kept["attempt"] for n, kept in history.current(events, "eval").items()} == {4: 3}
    log = history.Log.of(events)
    attempts = dict(zip(log.numbers.tolist(), log.column("attempt").tolist(), strict=True))
    assert attempts == {1: 1, 2: 1, 3: 3, 4: 3}
    assert log.current("eval") == history.current(events, "eval")


def test_current_keeps_the_highest_attempt_of_a_step() -> None:
    events = [event("step", 1, 1), event("resume", 0, 2, from_step=0), event("step", 1, 2)]
    assert history.current(events, "step")[1]["attempt"] == 2
    assert history.Log.of(events).column("attempt").tolist() == [2]
    assert history.Log.of(events).last_attempt == 2
    assert history.Log.of([]).last_attempt == 0


def test_run_without_metrics_has_no_events(tmp_path) -> None:
    assert history.read_events(tmp_path) == []


@pytest.mark.parametrize("damaged", [b'{"event": oops', b"[1, 2]", b'{"event": "step"}', b""])
def test_damaged_line_inside_the_file_is_left_out_and_named(tmp_path, damaged, capsys) -> None:
    content = whole_line(1) + damaged + b"\n" + whole_line(2)
    (tmp_path / "metrics.jsonl").write_bytes(content)
    for _ in range(2):
        assert history.read_log(tmp_path).numbers.tolist() == [1, 2]
    said = capsys.readouterr().err
    assert said.startswith(f"warning: {tmp_path / 'metrics.jsonl'} line 2: not ")
    assert said.count("\n") == 1, "once a process"
    assert f"gpt2lab runs repair-log {tmp_path}" in said
    assert [event["step"] for event in history.read_events(tmp_path)] == [1, 2]


# -- log and TensorBoard of a real run ---------------------------------------------------------------------------


def test_log_is_what_the_console_showed(tiny_flags, tmp_path, capsys) -> None:
    pretrain(parse([*tiny_flags, "--max_steps=3", "--log_freq=2"]))
    shown = capsys.readouterr()
    assert (tmp_path / "runs" / "tiny" / "log.txt").read_text() == shown.out
    assert "step 2/3 |" in shown.out
    assert shown.err == ""


def open_tensorboard(run_dir: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = {"histograms": 0, "scalars": 0, "tensors": 0}
    accumulator = EventAccumulator(str(run_dir / "tensorboard"), size_guidance=everything)
    accumulator.Reload()
    return accumulator


def test_tensorboard_mirrors_metrics_under_the_promised_tags(tiny_flags, tmp_path) -> None:
    works_with("tensorboard", version("tensorboard"), "curves, texts and settings read back")
    more = ["--vocab_size=50304", "--max_steps=4", "--eval_freq=2", "--sample_freq=2"]
    pretrain(parse([*tiny_flags, *more, "--sample_tokens=4", "--use_tensorboard"]))
    run_dir = tmp_path / "runs" / "tiny"
    written, events = open_tensorboard(run_dir), lines_of(run_dir)
    for tag, (kind, field, factor) in SCALARS.items():
        expected = {
            line["step"]: line[field] * factor
            for line in events
            if line["event"] == kind and line[field] is not None
        }
        mirrored = {scalar.step: scalar.value for scalar in written.Scalars(tag)}
        assert expected, tag
        assert mirrored == pytest.approx(expected, rel=1e-6), tag
    texts = {
        text.step: text.tensor_proto.string_val[0].decode()
        for text in written.Tensors("Generated_Samples/text/text_summary")
    }
    assert texts == {line["step"]: line["text"] for line in events if line["event"] == "sample"}
    assert set(texts) == {2, 4}
    (settings,) = written.Tensors("hparams/text_summary")
    assert "| n_embd | 32 |" in settings.tensor_proto.string_val[0].decode()


def test_histograms_of_weights_and_gradients_change_no_bit(tiny_flags, tmp_path) -> None:
    common = [*tiny_flags, "--max_steps=4", "--eval_freq=4", "--use_tensorboard", "--run_name"]
    pretrain(parse([*common, "plain"]))
    pretrain(parse([*common, "watched", "--histogram_freq=3"]))
    plain, watched = tmp_path / "runs" / "plain", tmp_path / "runs" / "watched"
    assert launch.losses(watched) == launch.losses(plain)
    assert launch.parameter_hash(watched, 4) == launch.parameter_hash(plain, 4)
    assert open_tensorboard(plain).Tags()["histograms"] == []
    written = open_tensorboard(watched)
    weights = load_file(watched / "step_00000004" / "model.safetensors")
    expected = {f"{kind}/{name}" for name in weights for kind in ("Parameters", "Gradients")}
    assert set(written.Tags()["histograms"]) == expected
    for name, tensor in weights.items():
        third, last = written.Histograms(f"Parameters/{name}")
        assert (third.step, last.step) == (3, 4)
        found = last.histogram_value
        assert found.num == tensor.size == sum(found.bucket)
        assert (found.min, found.max) == (float(tensor.min()), float(tensor.max()))
        inner = ((tensor > found.bucket_limit[20]) & (tensor <= found.bucket_limit[40])).sum()
        assert sum(found.bucket[21:41]) == pytest.approx(inner, abs=0.01 * tensor.size + 2)
    # The norm of step 4 is of the gradients before clipping; here nothing is clipped.
    squares = [
        written.Histograms(tag)[-1].histogram_value.sum_squares
        for tag in expected
        if tag.startswith("Gradients/")
    ]
    norm = launch.steps(watched)[4]["grad_norm"]
    assert math.sqrt(sum(squares)) == pytest.approx(min(norm, 1.0), rel=1e-4)


def test_a_tensor_with_nan_or_one_value_has_an_honest_histogram(tmp_path) -> None:
    model: Any = torch.nn.ParameterDict(
        {
            "nan": torch.tensor([1.0, math.nan]),
            "infinite": torch.tensor([1.0, math.inf]),
            "same": torch.full((3, 2), 2.0),
        }
    )
    logger = MetricsLogger(tmp_path, attempt=1, tensorboard_from=0)
    Histograms(model, logger, 1, last_step=1).parameters(1)
    logger.close()
    written = open_tensorboard(tmp_path)
    assert written.Tags()["histograms"] == ["Parameters/same"]
    (event,) = written.Histograms("Parameters/same")
    found = event.histogram_value
    assert (found.min, found.max, found.sum, found.sum_squares) == (2, 2, 12, 24)
    assert (found.num, sum(found.bucket)) == (6, 6)


def test_histograms_without_tensorboard_are_rejected(tiny_flags, tmp_path) -> None:
    with pytest.raises(ConfigError, match="histogram_freq 5 needs --use_tensorboard"):
        pretrain(parse([*tiny_flags, "--histogram_freq=5"]))
    assert not (tmp_path / "runs").exists()
    sharded = {"histogram_freq": 5, "use_tensorboard": True, "parallel": "fsdp"}
    assert "needs full tensors" in find_problems(override(Config(), sharded))[0]


def test_the_hparams_tab_knows_the_settings_of_a_run(tiny_flags, tmp_path) -> None:
    from tensorboard.plugins.hparams import plugin_data_pb2

    pretrain(parse([*tiny_flags, "--max_steps=1", "--use_tensorboard"]))
    content = open_tensorboard(tmp_path / "runs" / "tiny").summary_metadata
    data = plugin_data_pb2.HParamsPluginData.FromString(
        content["_hparams_/session_start_info"].plugin_data.content
    )
    settings = data.session_start_info.hparams
    assert settings["n_embd"].number_value == 32
    assert settings["dtype"].string_value == "fp32"


def test_tensorboard_replaces_the_steps_that_a_resume_takes_again(tiny_flags, tmp_path) -> None:
    common = [*tiny_flags, "--use_tensorboard"]
    pretrain(parse([*common, "--max_steps=4", "--checkpoint_freq=2", "--eval_freq=4"]))
    time.sleep(
        1.1
    )  # TensorBoard orders a run's files by the second in their name, as starts of a real run differ in
    pretrain(parse([*common, "--resume=2"]))
    run_dir = tmp_path / "runs" / "tiny"
    written = open_tensorboard(run_dir)
    assert [scalar.step for scalar in written.Scalars("Loss/train")] == [1, 2, 3, 4]
    assert [scalar.step for scalar in written.Scalars("Loss/validation")] == [0, 4]
    current = history.current(lines_of(run_dir), "step")
    assert [current[n]["attempt"] for n in (1, 2, 3, 4)] == [1, 1, 2, 2]
    seconds = {scalar.step: scalar.value for scalar in written.Scalars("Performance/step_time_ms")}
    assert seconds[3] == pytest.approx(1000 * current[3]["step_seconds"], rel=1e-6)


def test_run_writes_no_tensorboard_files_unless_asked(tiny_flags, tmp_path) -> None:
    pretrain(parse([*tiny_flags, "--max_steps=1"]))
    assert not (tmp_path / "runs" / "tiny" / "tensorboard").exists()
