"""What a whole run tells: metrics, cadence of evaluations and checkpoints, validation, samples."""

import hashlib
import importlib
import itertools
import math
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from gpt2lab.checkpoint import manifest
from gpt2lab.config.schema import ModelConfig
from gpt2lab.evaluation.validation import Validation
from gpt2lab.model.gpt import GPT
from plain_log import read_events
from tiny import TRAIN_SHARDS, VAL_SHARDS, make_tokens
from whole_run import LAST, STEP_TOKENS, WINDOWS, Run, S, T

REAL_VOCABULARY = ["--vocab_size=50304", "--sample_tokens=4", "--checkpoint_freq=0"]


def test_every_update_has_one_step_line_with_numbers_that_fit_together(straight):
    """The epoch is counted from the first sample of the step."""
    steps = straight.events("step")
    assert [event["step"] for event in steps] == list(range(1, LAST + 1))
    for event in steps:
        assert event["attempt"] == 1
        assert event["mfu"] is None, "the peak of a CPU is not known"
        assert event["tokens"] == STEP_TOKENS * event["step"]
        rate, seconds = event["tokens_per_second"], event["step_seconds"]
        assert rate * seconds == pytest.approx(STEP_TOKENS, rel=1e-9)
        assert 0 <= event["data_wait_seconds"] <= seconds
        assert event["peak_memory_bytes"] > 50e6, "a process with torch in it"
        assert event["grad_norm"] > 0
        assert re.fullmatch(r"[0-9a-f]{64}", event["batch_hash"])
    epochs = {event["step"]: event["epoch"] for event in steps}
    assert epochs == {n: ((n - 1) * S) // sum(WINDOWS) for n in range(1, LAST + 1)}
    assert set(epochs.values()) == {0, 1}


def hashes(order_of_epoch_1: tuple[int, ...]) -> dict[int, str]:
    """Return the hashes of batches of windows (n, T + 1) that are cut here a second time."""
    windows = []
    for shard in (*range(len(TRAIN_SHARDS)), *order_of_epoch_1):
        tokens = make_tokens(TRAIN_SHARDS[shard], seed=1000 * len("train") + shard)
        windows += [tokens[k * T : k * T + T + 1] for k in range(WINDOWS[shard])]
    samples = np.stack(windows)
    batches = {n: samples[(n - 1) * S : n * S].astype("<u2") for n in range(1, LAST + 1)}
    return {n: hashlib.sha256(batch.tobytes()).hexdigest() for n, batch in batches.items()}


def test_batch_hash_is_the_sha256_of_the_windows_in_sample_order(straight):
    written = {event["step"]: event["batch_hash"] for event in straight.events("step")}
    orders = list(itertools.permutations(range(len(TRAIN_SHARDS))))
    fitting = [order for order in orders if hashes(order) == written]
    assert fitting, "no order of the shards in epoch 1 gives these batches"
    assert len(fitting) < len(orders), "the claim needs batches that tell orders apart"


@pytest.fixture
def slowed(monkeypatch) -> Callable[..., None]:
    """Return a function that makes a method take 100 seconds more than it does, by this process's clock."""
    importlib.import_module("gpt2lab.training.pretrain")  # a class keeps the clock of its import
    clock, added = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + added[0])

    def slow(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            added[0] += 100
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    return slow


def test_seconds_of_a_step_hold_the_wait_for_data(run, slowed):
    slowed(Future, "result")
    run.train("--max_steps=2")
    for event in run.events("step"):
        assert event["step_seconds"] > event["data_wait_seconds"] >= 100


def test_seconds_of_a_step_hold_no_evaluation_and_no_saving(run, slowed):
    slowed(Validation, "measure")
    slowed(manifest, "commit")
    run.train("--max_steps=2", "--eval_freq=1", "--checkpoint_freq=1")
    for kind in ("eval", "checkpoint"):
        assert all(event["seconds"] >= 100 for event in run.events(kind))
    assert all(event["step_seconds"] < 100 for event in run.events("step"))


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


def test_evaluations_and_checkpoints_are_those_due_the_best_ones_and_the_epochs_end(straight):
    """An event of a checkpoint follows that of the step, and tells path, bytes and seconds."""
    steps = [event["step"] for event in straight.events("eval")]
    assert steps == [0, 4, 8, 12, 16, 20, 24, 26]
    written = [(e["step"], e["kind"], e["labels"]) for e in straight.events("checkpoint")]
    assert written == expected_checkpoints(straight, checkpoint_freq=5)
    assert {kind for _, kind, _ in written} == {"rolling", "best", "epoch", "final"}
    order = [(event["event"], event["step"]) for event in read_events(straight.path)]
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


def test_frequency_of_zero_means_only_after_the_last_step(run):
    run.train("--max_steps=5", "--eval_freq=0", "--checkpoint_freq=0")
    assert [event["step"] for event in run.events("eval")] == [0, 5]
    assert [event["step"] for event in run.events("checkpoint")] == list(run.checkpoints()) == [5]


def test_log_freq_thins_the_console_and_what_is_not_sampled_is_said_once(straight):
    lines = (straight.path / "log.txt").read_text().splitlines()
    shown = [line for line in lines if re.match(r"step \d+/\d+ \| epoch", line)]
    pattern = (
        r"step (\d+)/26 \| epoch \d \| loss \d\.\d{4} \| lr \d\.\de-\d\d \| norm \d+\.\d\d \| "
        r"dt \d+ ms \| [\d,]+ tok/s \| eta (n/a|\d+s)"
    )
    steps = [re.fullmatch(pattern, line) for line in shown]
    assert all(steps), shown
    assert [int(match[1]) for match in steps if match] == [1, 10, 20, 26]
    # Its vocabulary is below GPT-2's: no samples, and one warning.
    assert straight.events("sample") == []
    warned = [event for event in straight.events("warning") if "samples" in event["message"]]
    assert len(warned) == 1


def test_validation_loss_and_its_error_equal_an_independent_computation(straight):
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
            log_chances = model(window[None, :-1])[0].log_softmax(-1)
        means.append(-log_chances[torch.arange(T), window[1:]].mean().item())
    event = straight.events("eval")[-1]
    assert event["val_tokens"] == 320
    assert event["val_loss"] == pytest.approx(np.mean(means), rel=1e-6)
    expected = np.std(means, ddof=1) / math.sqrt(20)
    assert event["val_loss_se"] == pytest.approx(expected, rel=1e-4)


def test_dropout_is_at_work_after_an_evaluation(run, straight):
    run.train("--max_steps=1", "--dropout=0.3")
    assert [event["step"] for event in run.events("eval")] == [0, 1]
    assert run.events("eval")[0]["val_loss"] == straight.events("eval")[0]["val_loss"]
    assert run.losses()[1] != straight.losses()[1]


def test_samples_and_evaluations_leave_the_training_bits_alone(tiny_data, tmp_path):
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
