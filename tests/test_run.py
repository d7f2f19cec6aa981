"""Whole runs in this process, a few milliseconds a step: what a run's folder tells, and what a resume allows."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import launch
from gpt2lab import flags
from gpt2lab.checkpoints import catalog, checkpoint, manifest
from gpt2lab.config import ModelConfig
from gpt2lab.data.loader import Loader
from gpt2lab.errors import CheckpointError, ConfigError, GPT2LabError, NonFiniteError, SaveError
from gpt2lab.evaluation.sample import generate, sample_text
from gpt2lab.evaluation.validation import Validation
from gpt2lab.model import GPT, build_model
from gpt2lab.pretrain import pretrain
from gpt2lab.runs import history
from tiny import TRAIN_SHARDS, VAL_SHARDS, make_tokens, write_shards

T, S, STEP_TOKENS = 16, 8, 128
WINDOWS = [(tokens - 1) // T for tokens in TRAIN_SHARDS]  # 62, 48, 80: an epoch is 23.75 steps
LAST = 26
STEP_KEYS = {
    *("event", "time", "attempt", "step", "loss", "lr", "grad_norm", "step_seconds"),
    *("tokens_per_second", "tokens", "epoch", "data_wait_seconds", "mfu", "peak_memory_bytes"),
    "batch_hash",
}


class Run:
    """A run named `tiny` and its folder."""

    def __init__(self, data: Path, folder: Path, *always: str) -> None:
        self.path = folder / "tiny"
        self.flags = [
            *("--n_layer=2", "--n_head=2", "--n_embd=32", "--context_length=16"),
            *("--vocab_size=256", "--total_batch_size=128", "--mini_batch_size=2"),
            *("--device=cpu", "--dtype=fp32", "--compile=off", "--val_tokens=320"),
            *(f"--data_dir={data}", f"--checkpoint_dir={folder}", "--run_name=tiny", *always),
        ]

    def train(self, *more: str) -> None:
        pretrain(flags.parse([*self.flags, *more]))

    def refused(self, *more: str) -> GPT2LabError:
        """Return the refusal, without its traceback: the frames in it would keep the run locked."""
        try:
            self.train(*more)
        except GPT2LabError as error:
            return error.with_traceback(None)
        pytest.fail("this start should have been refused")

    def events(self, kind: str, attempt: int | None = None) -> list[dict[str, Any]]:
        return [
            event
            for event in history.read_events(self.path)
            if event["event"] == kind and attempt in (None, event["attempt"])
        ]

    def losses(self, attempt: int | None = None) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in self.events("step", attempt)}

    def checkpoints(self) -> dict[int, catalog.CheckpointInfo]:
        """Return the checkpoints on disk by step, every byte of each verified."""
        infos, damaged = catalog.list_checkpoints(self.path)
        assert not damaged
        for info in infos:
            manifest.verify(info.path)
        return {info.step: info for info in infos}

    def labels(self) -> dict[str, str]:
        return catalog.read_labels(self.path)

    def status(self) -> dict[str, Any]:
        return json.loads((self.path / "status.json").read_text())

    def saved_state(self, step: int) -> dict[str, Any]:
        file = self.path / manifest.folder_name(step) / "state.json"
        return json.loads(file.read_text())["state"]

    def listing(self) -> dict[str, tuple[int, int]]:
        """Return every path below the run with its size and time of change."""
        found = [self.path, *self.path.rglob("*")]
        stats = {str(path): path.stat() for path in found}
        return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


@pytest.fixture
def run(tiny_data, tmp_path) -> Run:
    return Run(tiny_data, tmp_path)


@pytest.fixture(scope="module")
def straight(tiny_data, tmp_path_factory) -> Run:
    """Return a run of 26 steps, into the second epoch; read only."""
    run = Run(tiny_data, tmp_path_factory.mktemp("straight"))
    run.train(f"--max_steps={LAST}", "--eval_freq=4", "--checkpoint_freq=5", "--log_freq=10")
    return run


# -- metrics.jsonl -----------------------------------------------------------------------------------------------


def test_every_update_has_one_step_line_with_every_key_of_the_contract(straight) -> None:
    steps = straight.events("step")
    assert [event["step"] for event in steps] == list(range(1, LAST + 1))
    for event in steps:
        assert set(event) >= STEP_KEYS
        assert event["attempt"] == 1
        assert event["mfu"] is None, "the peak of a CPU is not known"
        assert event["tokens"] == STEP_TOKENS * event["step"]
        rate, seconds = event["tokens_per_second"], event["step_seconds"]
        assert rate * seconds == pytest.approx(STEP_TOKENS, rel=1e-9)
        assert 0 <= event["data_wait_seconds"] <= seconds < 10
        assert event["peak_memory_bytes"] > 50e6, "a process with torch in it"
        assert event["grad_norm"] > 0
        assert re.fullmatch(r"[0-9a-f]{64}", event["batch_hash"])


def test_every_line_of_the_file_has_the_four_common_keys(straight) -> None:
    events = history.read_events(straight.path)
    assert {event["event"] for event in events} >= {"step", "eval", "checkpoint", "warning", "done"}
    for event in events:
        assert {"event", "time", "attempt", "step"} <= set(event)
    times = [event["time"] for event in events]
    assert times == sorted(times)


def test_training_lowers_the_loss_from_that_of_a_uniform_guess(straight) -> None:
    losses = straight.losses()
    assert losses[1] == pytest.approx(math.log(256), rel=0.02)
    assert losses[LAST] < losses[1] - 0.05


def test_epoch_is_counted_from_the_first_sample_of_the_step(straight) -> None:
    epochs = {event["step"]: event["epoch"] for event in straight.events("step")}
    assert epochs == {n: ((n - 1) * S) // sum(WINDOWS) for n in range(1, LAST + 1)}
    assert set(epochs.values()) == {0, 1}


def windows_of(shard: int) -> np.ndarray:
    """Return a training shard's windows (n, T + 1), cut here a second time."""
    tokens = make_tokens(TRAIN_SHARDS[shard], seed=1000 * len("train") + shard)
    return np.stack([tokens[k * T : k * T + T + 1] for k in range(WINDOWS[shard])])


def hashes(order_of_epoch_1: tuple[int, ...]) -> dict[int, str]:
    shards = [*range(len(TRAIN_SHARDS)), *order_of_epoch_1]
    samples = np.concatenate([windows_of(shard) for shard in shards])
    return {
        n: hashlib.sha256(samples[(n - 1) * S : n * S].astype("<u2").tobytes()).hexdigest()
        for n in range(1, LAST + 1)
    }


def test_batch_hash_is_the_sha256_of_the_windows_in_sample_order(straight) -> None:
    written = {event["step"]: event["batch_hash"] for event in straight.events("step")}
    orders = list(itertools.permutations(range(len(TRAIN_SHARDS))))
    fitting = [order for order in orders if hashes(order) == written]
    assert fitting, "no order of the shards in epoch 1 gives these batches"
    assert len(fitting) < len(orders), "the claim needs batches that tell orders apart"


def test_learning_rate_is_that_of_the_schedule_with_resolved_defaults(straight) -> None:
    warmup, low, high = LAST // 10, 6e-5, 6e-4
    for event in straight.events("step"):
        n = event["step"]
        decayed = low + (high - low) * (1 + math.cos(math.pi * (n - warmup) / (LAST - warmup))) / 2
        assert event["lr"] == pytest.approx(high * n / warmup if n < warmup else decayed, rel=1e-9)


def slowed(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **kwargs)

    return slow


def test_seconds_of_a_step_hold_the_wait_for_data(run, monkeypatch) -> None:
    monkeypatch.setattr(Loader, "fetch", slowed(Loader.fetch, 0.3))
    run.train("--max_steps=2")
    steps = run.events("step")
    # The reading thread has a moment's start: what was waited for is a little less than the 0.3 s.
    assert steps[0]["data_wait_seconds"] > 0.2, "nothing is read ahead of the first step"
    assert all(event["step_seconds"] > event["data_wait_seconds"] for event in steps)


def test_seconds_of_a_step_hold_no_evaluation_and_no_saving(run, monkeypatch) -> None:
    monkeypatch.setattr(Validation, "measure", slowed(Validation.measure, 0.4))
    monkeypatch.setattr(checkpoint, "save", slowed(checkpoint.save, 0.4))
    run.train("--max_steps=2", "--eval_freq=1", "--checkpoint_freq=1")
    assert all(event["seconds"] >= 0.4 for event in run.events("eval"))
    assert all(event["seconds"] >= 0.4 for event in run.events("checkpoint"))
    assert all(event["step_seconds"] < 0.4 for event in run.events("step"))


# -- cadence -----------------------------------------------------------------------------------------------------


def test_evaluations_happen_at_step_zero_at_each_due_step_and_after_the_last(straight) -> None:
    steps = [event["step"] for event in straight.events("eval")]
    assert steps == [0, 4, 8, 12, 16, 20, 24, 26]


def expected_checkpoints(run: Run, *, checkpoint_freq: int) -> list[tuple]:
    """Return (step, kind, labels) that the design asks for, given the run's own validation losses."""
    evals = {event["step"]: event["val_loss"] for event in run.events("eval")}
    best, expected = math.inf, []
    for n in range(1, LAST + 1):
        is_best = n in evals and evals[n] < best
        best = evals[n] if is_best else best
        ends_epoch = n * S // sum(WINDOWS) > (n - 1) * S // sum(WINDOWS)
        kinds = ["final"] if n == LAST else []
        kinds += ["rolling"] if n % checkpoint_freq == 0 else []
        kinds += ["epoch"] if ends_epoch else []
        kinds += ["best"] if is_best else []
        labels = (["epoch_0001"] if ends_epoch else []) + (["best"] if is_best else [])
        if kinds:
            expected.append((n, kinds[0], labels))
    return expected


def test_checkpoints_are_those_due_the_best_ones_and_the_epochs_end(straight) -> None:
    written = [
        (event["step"], event["kind"], event["labels"]) for event in straight.events("checkpoint")
    ]
    assert written == expected_checkpoints(straight, checkpoint_freq=5)
    assert {kind for _, kind, _ in written} == {"rolling", "best", "epoch", "final"}


def test_checkpoint_event_follows_the_step_and_tells_path_bytes_and_seconds(straight) -> None:
    order = [(event["event"], event["step"]) for event in history.read_events(straight.path)]
    for event in straight.events("checkpoint"):
        n = event["step"]
        assert order.index(("step", n)) < order.index(("checkpoint", n))
        if n < LAST:
            assert order.index(("checkpoint", n)) < order.index(("step", n + 1))
        assert event["path"] == str(straight.path / f"step_{n:08d}")
        assert event["seconds"] > 0
    for n, info in straight.checkpoints().items():
        (event,) = [event for event in straight.events("checkpoint") if event["step"] == n]
        assert event["bytes"] == sum(file.stat().st_size for file in info.path.iterdir())


def test_labels_name_the_best_the_one_before_and_the_epoch(straight) -> None:
    best = [event["step"] for event in straight.events("checkpoint") if "best" in event["labels"]]
    assert len(best) >= 2
    assert straight.labels() == {
        "best": f"step_{best[-1]:08d}",
        "best_prev": f"step_{best[-2]:08d}",
        "epoch_0001": "step_00000024",
    }


def test_unlabelled_checkpoints_of_a_former_best_are_gone(straight) -> None:
    best = [event["step"] for event in straight.events("checkpoint") if event["kind"] == "best"]
    labelled = {int(name[5:]) for name in straight.labels().values()}
    assert set(straight.checkpoints()) == {5, 10, 15, 20, 25, LAST} | labelled
    assert set(best) - labelled, "the claim needs a best that lost its label"


def test_frequency_of_zero_means_only_after_the_last_step(run) -> None:
    run.train("--max_steps=5", "--eval_freq=0", "--checkpoint_freq=0")
    assert [event["step"] for event in run.events("eval")] == [0, 5]
    assert [event["step"] for event in run.events("checkpoint")] == [5]
    assert list(run.checkpoints()) == [5]


def test_log_freq_thins_the_console_and_not_the_metrics(straight) -> None:
    lines = (straight.path / "log.txt").read_text().splitlines()
    shown = [line for line in lines if re.match(r"step \d+/\d+ \| epoch", line)]
    pattern = (
        r"step (\d+)/26 \| epoch \d \| loss \d\.\d{4} \| lr \d\.\de-\d\d \| norm \d+\.\d\d \| "
        r"dt \d+ ms \| [\d,]+ tok/s \| mfu n/a \| eta (n/a|\d+s)"
    )
    steps = [re.fullmatch(pattern, line) for line in shown]
    assert all(steps), shown
    assert [int(match[1]) for match in steps if match] == [1, 10, 20, 26]


# -- the end of a start ------------------------------------------------------------------------------------------


def test_completed_run_says_so_in_its_status_and_in_its_last_event(straight) -> None:
    status = straight.status()
    assert (status["state"], status["step"], status["exit_code"]) == ("completed", LAST, 0)
    done = history.read_events(straight.path)[-1]
    steps = straight.events("step")
    assert (done["event"], done["step"]) == ("done", LAST)
    assert done["reason"]
    assert done["checkpoint"] == str(straight.path / f"step_{LAST:08d}")
    assert done["loss"] == steps[-1]["loss"]
    assert done["val_loss"] == straight.events("eval")[-1]["val_loss"]
    assert done["seconds"] == pytest.approx(sum(event["step_seconds"] for event in steps))


def test_finished_run_resumed_unchanged_writes_nothing(run, capsys) -> None:
    run.train("--max_steps=2")
    before = run.listing()
    capsys.readouterr()
    run.train("--max_steps=2", "--resume=latest")
    assert "already complete" in capsys.readouterr().out
    assert run.listing() == before


def test_fresh_start_over_checkpoints_is_refused_with_both_ways_out(run) -> None:
    run.train("--max_steps=2")
    before = run.listing()
    refusal = run.refused("--max_steps=2")
    assert isinstance(refusal, ConfigError)
    assert refusal.exit_code == 2
    assert "--run_name tiny --resume latest" in str(refusal)
    assert "--run_name tiny_2" in str(refusal)
    assert "\n" not in str(refusal)
    assert run.listing() == before


def test_stop_after_steps_saves_and_leaves_the_schedule_alone(run, straight) -> None:
    common = [f"--max_steps={LAST}", "--eval_freq=0", "--checkpoint_freq=0"]
    run.train(*common, "--stop_after_steps=3")
    assert list(run.checkpoints()) == [3]
    status, stop = run.status(), history.read_events(run.path)[-1]
    assert (status["state"], status["step"], status["exit_code"]) == ("stopped", 3, 0)
    assert (stop["event"], stop["reason"]) == ("stop", "stop_after_steps")
    assert stop["checkpoint"] == str(run.path / "step_00000003")
    assert run.refused(*common, "--resume=latest", "--stop_after_steps=3").exit_code == 2
    run.train(*common, "--resume=latest", "--stop_after_steps=7")
    assert run.losses() == {n: loss for n, loss in straight.losses().items() if n <= 7}
    assert [event["step"] for event in run.events("eval")] == [0], "a stop is not the last step"


def test_non_finite_loss_ends_the_run_with_its_own_code_and_leaves_the_checkpoints(run) -> None:
    refusal = run.refused("--max_steps=9", "--checkpoint_freq=1", "--max_lr=1e30", "--min_lr=0")
    assert isinstance(refusal, NonFiniteError)
    assert refusal.exit_code == 76
    status, stop = run.status(), history.read_events(run.path)[-1]
    assert (status["state"], status["exit_code"]) == ("failed", 76)
    assert stop["event"] == "stop"
    assert "NonFiniteError" in stop["reason"]
    assert list(run.checkpoints()) == list(range(1, status["step"])), (
        "the fourth bad one is not saved"
    )


# -- validation --------------------------------------------------------------------------------------------------


def test_validation_loss_does_not_depend_on_the_micro_batch(tiny_data, tmp_path) -> None:
    measured = []
    for size in (1, 2, 4):
        run = Run(tiny_data, tmp_path / str(size))
        run.train("--max_steps=1", f"--mini_batch_size={size}")
        measured.append(run.events("eval")[0])
    assert [event["val_tokens"] for event in measured] == [320] * 3
    for event in measured[1:]:
        assert event["val_loss"] == pytest.approx(measured[0]["val_loss"], rel=1e-6)
        assert event["val_loss_se"] == pytest.approx(measured[0]["val_loss_se"], rel=1e-4)


def test_validation_loss_and_its_error_equal_an_independent_computation(straight) -> None:
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, context_length=T, vocab_size=256)
    model = GPT(config).double().eval()
    saved = safetensors.torch.load_file(straight.path / f"step_{LAST:08d}" / "model.safetensors")
    model.load_state_dict(saved)
    tokens = make_tokens(VAL_SHARDS[0], seed=1000 * len("val")).astype(np.int64)
    assert (len(tokens) - 1) // T == 40
    means = []
    for k in range(0, 40, 2):  # 320 tokens are 20 windows, spread evenly over the 40
        window = torch.from_numpy(tokens[k * T : k * T + T + 1])
        with torch.no_grad():
            log_chances = model.logits(window[None, :-1])[0].log_softmax(-1)
        means.append(-log_chances[torch.arange(T), window[1:]].mean().item())
    event = straight.events("eval")[-1]
    assert event["val_tokens"] == 320
    assert event["val_loss"] == pytest.approx(np.mean(means), rel=1e-6)
    expected = np.std(means, ddof=1) / math.sqrt(20)
    assert event["val_loss_se"] == pytest.approx(expected, rel=1e-4)


# -- resume ------------------------------------------------------------------------------------------------------


def test_resume_continues_with_the_same_bits_and_says_from_where(run, straight) -> None:
    common = [f"--max_steps={LAST}", "--eval_freq=4", "--checkpoint_freq=5"]
    run.train(*common, "--stop_after_steps=13")
    run.train(*common, "--resume=latest")
    assert list(run.losses(attempt=2)) == list(range(14, LAST + 1))
    assert run.losses() == straight.losses()
    (resume,) = run.events("resume")
    assert (resume["from_step"], resume["world_size"], resume["attempt"]) == (13, 1, 2)
    assert (resume["changes"], resume["level"]) == ({}, "bit-identical")
    names = ("model.safetensors", "optim.safetensors")
    ours, theirs = (r.checkpoints()[LAST].manifest["files"] for r in (run, straight))
    assert [ours[name] for name in names] == [theirs[name] for name in names]


def test_worse_evaluation_after_a_resume_is_not_labelled_best(run) -> None:
    run.train("--max_steps=4", "--eval_freq=2")
    labels, best = run.labels(), run.saved_state(4)["best_val_loss"]
    assert labels["best"] == "step_00000004"
    changes = ["--allow_change=max_steps,max_lr,min_lr", "--max_lr=0.5", "--min_lr=0.5"]
    run.train("--max_steps=8", "--resume=latest", "--eval_freq=2", *changes)
    worse = {event["step"]: event["val_loss"] for event in run.events("eval", attempt=2)}
    assert set(worse) == {6, 8}
    assert min(worse.values()) > best, "the claim needs worse evaluations"
    assert run.labels() == labels
    assert run.saved_state(8)["best_val_loss"] == best
    assert run.saved_state(8)["best_step"] == 4
    assert not any(event["labels"] for event in run.events("checkpoint", attempt=2))


def test_other_architecture_is_refused_on_resume(run) -> None:
    run.train("--max_steps=4", "--stop_after_steps=2")
    before = run.listing()
    for change in ("--n_layer=3", "--n_embd=48", "--vocab_size=300", "--context_length=8"):
        refusal = run.refused("--resume=latest", change, "--allow_change=n_layer,n_embd")
        assert isinstance(refusal, ConfigError)
        assert "another architecture" in str(refusal)
        assert change[2:].partition("=")[0] in str(refusal)
    assert run.listing() == before


def test_changed_rate_is_refused_until_allowed_and_then_recorded(run) -> None:
    run.train("--max_steps=6", "--stop_after_steps=2")
    before = run.listing()
    refusal = run.refused("--resume=latest", "--max_lr=1e-3")
    assert refusal.exit_code == 2
    assert "max_lr 0.0006 -> 0.001" in str(refusal)
    assert "--allow_change max_lr" in str(refusal)
    assert run.listing() == before
    run.train("--resume=latest", "--max_lr=1e-3", "--allow_change=max_lr")
    (resume,) = run.events("resume")
    assert resume["level"] == "changed"
    assert resume["changes"]["max_lr"] == [6e-4, 1e-3]
    record = {"step": 2, "attempt": 2, "changes": {"max_lr": [6e-4, 1e-3]}}
    assert run.saved_state(6)["history"] == [record]
    assert run.checkpoints()[6].manifest["config"]["max_lr"] == 1e-3
    expected = 6e-5 + (1e-3 - 6e-5) * (1 + math.cos(math.pi * 3 / 6)) / 2
    assert run.events("step", attempt=2)[0]["lr"] == pytest.approx(expected)


def test_typing_the_saved_value_again_is_no_change(run) -> None:
    run.train("--max_steps=4", "--stop_after_steps=2")
    same = ["--max_lr=6e-4", "--warmup_steps=0", "--seed=1337", "--model=gpt2"]
    run.train("--max_steps=4", "--resume=latest", *same)
    (resume,) = run.events("resume")
    assert (resume["changes"], resume["level"]) == ({}, "bit-identical")


def test_settings_that_are_free_change_without_asking(run) -> None:
    run.train("--max_steps=6", "--stop_after_steps=2")
    free = ["--eval_freq=1", "--keep_checkpoints=2", "--mini_batch_size=4", "--log_freq=1"]
    run.train("--resume=latest", *free)
    (resume,) = run.events("resume")
    assert resume["changes"] == {
        "eval_freq": [250, 1],
        "keep_checkpoints": [10, 2],
        "mini_batch_size": [2, 4],
        "log_freq": [10, 1],
    }
    assert resume["level"] == "same data"
    assert run.saved_state(6)["history"] == []
    assert run.status()["state"] == "completed"


def test_dropout_is_at_work_after_an_evaluation(run, straight) -> None:
    run.train("--max_steps=1", "--dropout=0.3")
    assert [event["step"] for event in run.events("eval")] == [0, 1]
    assert run.events("eval")[0]["val_loss"] == straight.events("eval")[0]["val_loss"]
    assert run.losses()[1] != straight.losses()[1]


def test_micro_batch_is_guarded_where_dropout_depends_on_it(run) -> None:
    run.train("--max_steps=4", "--dropout=0.1", "--stop_after_steps=2")
    refusal = run.refused("--resume=latest", "--mini_batch_size=4")
    assert "--allow_change mini_batch_size" in str(refusal)
    run.train("--resume=latest", "--mini_batch_size=4", "--allow_change=mini_batch_size")
    assert run.saved_state(4)["history"][0]["changes"] == {"mini_batch_size": [2, 4]}


def test_other_data_is_refused_until_allowed_by_name(run, tmp_path) -> None:
    run.train("--max_steps=4", "--stop_after_steps=2")
    other = f"--data_dir={write_shards(tmp_path / 'other', train=(900,), val=(300,))}"
    refusal = run.refused("--resume=latest", other)
    assert "--allow_change data" in str(refusal)
    run.train("--resume=latest", other, "--allow_change=data")
    (record,) = run.saved_state(4)["history"]
    assert list(record["changes"]) == ["data"]
    windows = make_tokens(900, seed=5000)[: S * T + 1].astype("<u2")
    first = np.stack([windows[k * T : k * T + T + 1] for k in range(S)])
    resumed = run.events("step", attempt=2)[0]
    assert resumed["batch_hash"] == hashlib.sha256(first.tobytes()).hexdigest()


def test_resuming_an_older_step_sets_the_newer_ones_aside(run) -> None:
    common = ["--max_steps=5", "--checkpoint_freq=1", "--eval_freq=0"]
    run.train(*common)
    first = run.losses()
    run.train("--resume=2", "--stop_after_steps=4")
    (aside,) = run.path.glob("superseded-*")
    assert sorted(path.name for path in aside.iterdir()) == [f"step_{n:08d}" for n in (3, 4, 5)]
    for folder in aside.iterdir():
        manifest.verify(folder)
    assert list(run.checkpoints()) == [1, 2, 3, 4]
    assert "best" not in run.labels(), "the best was step 5, which is no longer of this run"
    current = history.current(history.read_events(run.path), "step")
    assert {n: event["attempt"] for n, event in current.items()} == {1: 1, 2: 1, 3: 2, 4: 2}
    assert {n: event["loss"] for n, event in current.items()} == {
        n: loss for n, loss in first.items() if n <= 4
    }


def test_resume_without_a_checkpoint_is_an_error_and_auto_a_fresh_start(run) -> None:
    refusal = run.refused("--resume=latest", "--max_steps=2")
    assert isinstance(refusal, CheckpointError)
    assert not run.path.exists()
    run.train("--resume=auto", "--max_steps=4", "--stop_after_steps=2")
    run.train("--resume=auto", "--max_steps=4")
    assert list(run.losses(attempt=1)) == [1, 2]
    assert list(run.losses(attempt=2)) == [3, 4]


# -- retention ---------------------------------------------------------------------------------------------------


def test_retention_keeps_the_last_rolling_ones_and_everything_labelled(run) -> None:
    # 95 windows a step: an epoch of 190 windows is exactly two steps.
    batch = ["--total_batch_size=1520", "--mini_batch_size=5", "--num_epochs=3"]
    run.train(*batch, "--checkpoint_freq=1", "--keep_checkpoints=1", "--eval_freq=3")
    assert [event["epoch"] for event in run.events("step")] == [0, 0, 1, 1, 2, 2]
    assert [event["step"] for event in run.events("checkpoint")] == [1, 2, 3, 4, 5, 6]
    evals = {event["step"]: event["val_loss"] for event in run.events("eval")}
    assert evals[6] < evals[3], "the claim needs a second best"
    assert run.labels() == {
        "epoch_0001": "step_00000002",
        "epoch_0002": "step_00000004",
        "epoch_0003": "step_00000006",
        "best_prev": "step_00000003",
        "best": "step_00000006",
    }
    assert list(run.checkpoints()) == [2, 3, 4, 6]


# -- samples -----------------------------------------------------------------------------------------------------

REAL_VOCABULARY = ["--vocab_size=50304", "--sample_tokens=4", "--checkpoint_freq=0"]


def test_samples_and_evaluations_leave_the_training_bits_alone(tiny_data, tmp_path) -> None:
    losses = []
    for freq in (0, 1):
        run = Run(tiny_data, tmp_path / str(freq), *REAL_VOCABULARY, "--dropout=0.1")
        run.train("--max_steps=3", f"--eval_freq={freq}", f"--sample_freq={freq}")
        samples = run.events("sample")
        assert [event["step"] for event in samples] == ([1, 2, 3] if freq else [3])
        for event in samples:
            assert event["text"].startswith("Hello, I'm a language model,")
            assert event["seconds"] > 0
        losses.append(run.losses())
    assert losses[0] == losses[1]


def test_vocabulary_below_gpt2s_gets_no_samples_and_one_warning(straight) -> None:
    assert straight.events("sample") == []
    warned = [event for event in straight.events("warning") if "samples" in event["message"]]
    assert len(warned) == 1


@pytest.fixture(scope="module")
def padded_model() -> GPT:
    """Return a model with the 47 padding rows of the default vocabulary."""
    config = ModelConfig(n_layer=1, n_head=1, n_embd=8, context_length=6, vocab_size=50304)
    return build_model(config, seed=1, device=torch.device("cpu")).eval()


def test_text_depends_on_the_seed_alone_and_leaves_the_model_in_its_mode(padded_model) -> None:
    texts = []
    for global_seed, seed, training in ((1, 7, True), (2, 7, False), (2, 8, True)):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        padded_model.train(training)
        texts.append(sample_text(padded_model, "def ", max_new_tokens=5, seed=seed))
        assert padded_model.training == training
        assert torch.equal(torch.get_rng_state(), before)
    padded_model.eval()
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("def ") for text in texts)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_padding_ids_are_never_drawn_however_high_their_logits(padded_model, monkeypatch) -> None:
    plain = padded_model.head

    def high_on_padding(hidden: torch.Tensor) -> torch.Tensor:
        logits = plain(hidden).clone()
        logits[..., 50257:] = 1e4
        return logits

    monkeypatch.setattr(padded_model, "head", high_on_padding)
    ids = generate(padded_model, [1, 2], max_new_tokens=40, generator=seeded(), top_k=50304)
    assert ids[:2] == [1, 2]
    assert len(ids) == 42
    assert max(ids) < 50257


def test_sampling_draws_from_its_own_generator_alone(padded_model) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    texts = [generate(padded_model, [5], max_new_tokens=8, generator=seeded(n)) for n in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_sampling_ends_at_end_of_text_and_keeps_to_the_context(padded_model, monkeypatch) -> None:
    lengths = []
    extend = padded_model.extend

    def watched(tokens: torch.Tensor, caches: list) -> torch.Tensor:
        lengths.append(tokens.size(1))
        return extend(tokens, caches)

    def certain(hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*hidden.shape[:-1], 50304)
        logits[..., 50256 if len(lengths) > 9 else 17] = 1e4
        return logits

    monkeypatch.setattr(padded_model, "extend", watched)
    monkeypatch.setattr(padded_model, "head", certain)
    ids = generate(padded_model, [1, 2], max_new_tokens=40, generator=seeded())
    assert ids == [1, 2] + [17] * 9
    assert lengths == [2, 1, 1, 1, 1, 3, 1, 1, 1, 3], (
        "one new id a step; full, it keeps the newer half"
    )


# -- a disk that is full -----------------------------------------------------------------------------------------


def test_full_disk_at_a_rolling_checkpoint_warns_and_training_goes_on(run, monkeypatch) -> None:
    monkeypatch.setenv("FAULT", "checkpoint.model.safetensors:enospc@4")
    run.train("--max_steps=6", "--checkpoint_freq=2", "--eval_freq=0")
    assert list(run.losses()) == [1, 2, 3, 4, 5, 6]
    assert list(run.checkpoints()) == [2, 6]
    (warning,) = [event for event in run.events("warning") if event["step"] == 4]
    assert "checkpoint of step 4 not saved" in warning["message"]
    assert "No space left" in warning["message"]
    assert [event["step"] for event in run.events("checkpoint")] == [2, 6]
    assert not list(run.path.glob(".*")), "nothing half-written is left"


@pytest.mark.parametrize("planned", ["--max_steps=4", "--stop_after_steps=4"])
def test_full_disk_where_the_process_ends_is_an_error(run, monkeypatch, planned) -> None:
    common = ["--max_steps=9", "--checkpoint_freq=3", "--eval_freq=0", planned]
    monkeypatch.setenv("FAULT", "checkpoint.model.safetensors:enospc@4")
    refusal = run.refused(*common)
    assert isinstance(refusal, SaveError)
    assert refusal.exit_code == 75
    assert (run.status()["state"], run.status()["exit_code"]) == ("failed", 75)
    assert list(run.checkpoints()) == [3]
    monkeypatch.delenv("FAULT")
    run.train(*common, "--resume=latest")
    assert list(run.checkpoints()) == [3, 4]
    assert run.losses(attempt=1)[4] == run.losses(attempt=2)[4]


def test_a_closed_console_does_not_end_a_run(tmp_path: Path, tiny_flags: list[str]) -> None:
    """`python src/train.py ... | head` once ended training and reported success."""
    flags = [*tiny_flags, "--max_steps=20", "--log_freq=1"]
    command = launch.command_for(launch.TRAIN, flags, world=1)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=launch.environment()) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 0
    assert [event["step"] for event in launch.events(tmp_path / "runs" / "tiny", "done")] == [20]
    assert "step 20/20" in (tmp_path / "runs" / "tiny" / "log.txt").read_text()
