"""A long metrics.jsonl: its columns say what its lines say, cost little memory, and damaged lines are named."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gpt2lab.errors import GPT2LabError
from gpt2lab.runs import overview, summary
from gpt2lab.runs.events import COLUMNS
from gpt2lab.runs.history import open_log, read_log
from long_logs import BUDGET, damage_lines, lines_of_a_start, long_run_of, peak_bytes
from plain_log import current_events, log_of, read_events


def test_a_change_of_the_validation_goes_with_the_start_that_made_it():
    base, changes = {"time": 0.0, "attempt": 1}, {"val_tokens": [1, 2]}
    events = [base | {"event": "eval", "step": n, "val_loss": 9 - n} for n in range(4)]
    events += [base | {"event": "resume", "step": 2, "changes": changes}, events[3]]
    assert [event["step"] for event in log_of(events).evals_of_data()] == [3]
    events += [base | {"event": "resume", "step": 1, "changes": {}}]
    assert [event["step"] for event in log_of(events).evals_of_data()] == [0, 1]


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """Return a run of three starts with a rewind, 900 steps, and a step that nobody logged a start before."""
    rewound = {"event": "rewind", "time": 1.7e9, "attempt": 2, "step": 350, "spike_step": 400}
    again = [line for line in lines_of_a_start(2, attempt=3, first=499) if '"step",' in line]
    lines = [
        *lines_of_a_start(300),
        *lines_of_a_start(150, attempt=2, first=251),
        json.dumps(rewound) + "\n",
        *lines_of_a_start(150, attempt=2, first=351),
        *lines_of_a_start(299, attempt=3, first=401),
        *again,
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    return tmp_path


def assert_says_what_the_log_says(run_dir: Path) -> None:
    events, log = read_events(run_dir), open_log(run_dir)
    steps = current_events(events, "step")
    assert log.events == [event for event in events if event["event"] != "step"]
    assert log.numbers.tolist() == sorted(steps)
    for name in ("attempt", *COLUMNS):
        expected = [steps[number].get(name) for number in sorted(steps)]
        expected = [np.nan if value is None else value for value in expected]
        np.testing.assert_array_equal(log.column(name), expected)
    chosen = sorted(steps)[::41]
    assert [log.step(number) for number in chosen] == [steps[number] for number in chosen]
    assert log.step(0) is log.step(10**6) is None
    assert log.last_step() == steps[max(steps)]
    assert {event["step"]: event for event in log.current_steps()} == steps
    assert log.current("eval") == current_events(events, "eval")
    assert log.last_attempt == max(event["attempt"] for event in events)
    last = [e for e in events if e["attempt"] == log.last_attempt and e["event"] == "step"]
    assert log.last_start("step").tolist() == [event["step"] for event in last]
    assert log.steps[log.attempts == 2].max() == 500
    spent: dict[int, float] = {}
    for event in events:
        attempt = event["attempt"]
        if event["event"] == "step":
            spent[attempt] = event["elapsed_seconds"]
        elif event["event"] != "done":
            spent[attempt] = spent.get(attempt, 0.0) + (event.get("seconds") or 0.0)
    assert log.spent_seconds() == sum(spent.values())
    assert log.seconds_in_steps() == pytest.approx(sum(e.get("step_seconds") or 0 for e in events))
    assert log.peak_memory() == 338096128


def test_a_step_that_the_fast_decoder_does_not_take_has_its_row(run_dir):
    """Null and text that is not UTF-8 are fine in our log; zero bytes are lines that a power cut took."""
    assert_says_what_the_log_says(run_dir)
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[50] = re.sub(rb'"loss": [^,]*', b'"loss": null', lines[50])
    lines[60] = bytes(999) + lines[60]
    lines[70] = re.sub(rb'"batch_hash": "..', rb'"batch_hash": "\\ud800', lines[70])
    path.write_bytes(b"".join(lines))
    assert_says_what_the_log_says(run_dir)
    assert np.isnan(open_log(run_dir).column("loss")).sum() == 1
    # A log that was changed while it was read gives no other numbers.
    log = open_log(run_dir)
    path.write_text("other\n" * 10**6)
    with pytest.raises(GPT2LabError, match="changed while it was read"):
        log.last_step()


@pytest.fixture(scope="module")
def long_run(tmp_path_factory, straight) -> Path:
    return long_run_of(straight.path, tmp_path_factory.mktemp("long") / "r")


READERS: dict[str, Callable[[Path], object]] = {
    "start": lambda run_dir: read_log(run_dir).step(10_000),
    "status": overview.read_run,
    "end": summary.describe_run,
}


@pytest.mark.parametrize("name", READERS)
def test_a_long_log_costs_little_memory(long_run, name):
    """A million lines, 640 MB, must not cost over about 100 MB: as dictionaries they take 3.5 GB."""
    assert peak_bytes(READERS[name], long_run) < BUDGET


def test_a_resume_over_damaged_lines_continues_with_the_same_bits(run, straight, capsys):
    common = ["--max_steps=26", "--eval_freq=4", "--checkpoint_freq=5", "--log_freq=10"]
    run.train(*common, "--stop_after_steps=15")
    damage_lines(run.path / "metrics.jsonl", 9)
    run.train(*common, "--resume=10")
    assert "line 9: not JSON" in capsys.readouterr().err
    [resumed] = run.events("resume")
    assert resumed["verified_batches"] == [10, 11]
    assert run.losses(attempt=2) == {n: loss for n, loss in straight.losses().items() if n > 10}
