"""Killed and resumed equals never stopped: the same bits at the same world, the same tokens at another."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import launch
from gpt2lab.errors import CheckpointError
from gpt2lab.training.resolve import resolve
from tiny import parse, pretrain, write_shards

# T = 16, S = 8 windows a step. The training shards of tiny_data have 62, 48 and 80 windows: shard ends after
# 7.75, 13.75 and 23.75 steps, and the epoch ends within step 24.
MID_SHARD, SHARD_END, ACROSS_EPOCH, LAST = 10, 8, 24, 34


def _flags(data: Path, folder: Path, *more: str) -> list[str]:
    return [
        *("--n_layer=2", "--n_head=2", "--n_embd=32", "--context_length=16", "--vocab_size=256"),
        *("--total_batch_size=128", "--mini_batch_size=2", "--val_tokens=320", "--eval_freq=5"),
        *("--device=cpu", "--dtype=fp32", "--compile=off", "--checkpoint_freq=1"),
        *(f"--data_dir={data}", f"--checkpoint_dir={folder}", "--run_name=run", *more),
    ]


def _train(flags: list[str], *, world: int = 1) -> None:
    """Train to the end: one process here, where torch is loaded, several in forks."""
    if world == 1:
        pretrain(parse(flags))
    else:
        done = launch.train_in_forks(flags, world=world)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def straight(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function from a world size to the folder of its run that was never stopped."""

    @functools.cache
    def run(world: int) -> Path:
        folder = tmp_path_factory.mktemp(f"straight{world}")
        _train(_flags(tiny_data, folder, f"--max_steps={LAST}"), world=world)
        return folder / "run"

    return run


@pytest.mark.parametrize(
    ("world", "cut"),
    [
        (1, ACROSS_EPOCH),
        pytest.param(1, MID_SHARD, marks=pytest.mark.slow),
        pytest.param(2, SHARD_END, marks=pytest.mark.slow),
    ],
)
def test_kill_and_resume_is_bit_identical(
    world: int, cut: int, straight: Callable[[int], Path], tiny_data: Path, tmp_path: Path
) -> None:
    """Killed just before step `cut + 1` and resumed: every loss and the final weights are the same bits."""
    expected, run = straight(world), tmp_path / "run"
    flags = _flags(tiny_data, tmp_path, f"--max_steps={LAST}")
    killed = launch.train_in_forks(flags, world=world, FAULT=f"step:kill9@{cut + 1}")
    assert killed.returncode != 0
    assert max(launch.steps(run)) == cut

    _train([*flags, "--resume=latest"], world=world)
    [event] = launch.events(run, "resume")
    assert (event["from_step"], event["level"], event["changes"]) == (cut, "bit-identical", {})
    assert launch.losses(run) == launch.losses(expected)
    assert launch.parameter_hash(run, LAST) == launch.parameter_hash(expected, LAST)
    hashes = [{s: e["batch_hash"] for s, e in launch.steps(r).items()} for r in (run, expected)]
    assert hashes[0] == hashes[1]
    evals = [{e["step"]: e["val_loss"] for e in launch.events(r, "eval")} for r in (run, expected)]
    assert evals[0] == evals[1]


@pytest.mark.slow
def test_the_first_resumed_step_sums_like_all_others(tiny_data: Path, tmp_path: Path) -> None:
    """From three processes on DDP's first step would add in another order: only the weights' hash shows it."""
    world = 3
    shape = ("--total_batch_size=192", "--mini_batch_size=1", "--max_steps=12")
    flags = [*_flags(tiny_data, tmp_path / "cut", *shape)]
    straight = [*_flags(tiny_data, tmp_path / "straight", *shape)]
    for words in (straight, [*flags, "--stop_after_steps=6"], [*flags, "--resume=latest"]):
        _train(words, world=world)
    runs = [tmp_path / name / "run" for name in ("straight", "cut")]
    assert [event["level"] for event in launch.events(runs[1], "resume")] == ["bit-identical"]
    assert launch.parameter_hash(runs[0], 12) == launch.parameter_hash(runs[1], 12)
    assert launch.losses(runs[0]) == launch.losses(runs[1])


def test_a_signal_cuts_an_evaluation_short_and_the_step_is_saved(
    tiny_data: Path, tmp_path: Path
) -> None:
    """An evaluation may take minutes, a scheduler waits 30 seconds; the resumed run makes up for it."""
    data = write_shards(tmp_path / "data", train=(4_000,), val=(800_000,))
    runs = tmp_path / "runs"
    first = _flags(data, runs, "--max_steps=8", "--eval_freq=4", "--stop_after_steps=2")
    _train(first)
    long = _flags(data, runs, "--max_steps=8", "--eval_freq=4", "--val_tokens=800000")
    process, run = launch.start([*long, "--mini_batch_size=1", "--resume=latest"]), runs / "run"
    try:
        launch.wait_for_step(process, run, 4)  # its evaluation of 50,000 windows is under way
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=launch.HANG_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0
    assert [(e["step"], e["reason"]) for e in launch.events(run, "stop")][-1] == (4, "SIGTERM")
    assert [event["step"] for event in launch.events(run, "eval")] == [0]
    _train([*first[:-1], "--resume=latest"])
    assert [event["step"] for event in launch.events(run, "eval")] == [0, 4, 8]


@pytest.mark.slow
def test_compiled_steps_on_many_threads_resume_bit_identically(tmp_path: Path) -> None:
    """As a user runs it: compiled, bf16 where there is one, all threads. Compiled sums once raced."""
    data = write_shards(tmp_path / "data", train=(40_000,), val=(2_000,))
    shape = (
        "--n_layer=2",
        "--n_head=2",
        "--n_embd=128",
        "--context_length=128",
        "--vocab_size=256",
    )
    more = ("--mini_batch_size=8", "--total_batch_size=2048", "--compile=on", "--dtype=auto")
    more += ("--max_steps=8", "--checkpoint_freq=1", "--eval_freq=0", "--val_tokens=1024")
    flags = [*shape, *more, "--device=cpu", f"--data_dir={data}", "--run_name=run"]
    flags, run = [*flags, f"--checkpoint_dir={tmp_path}"], tmp_path / "run"
    assert launch.train(flags, OMP_NUM_THREADS="2").returncode == 0
    losses, weights = launch.losses(run), launch.parameter_hash(run, 8)
    assert launch.train([*flags, "--resume=1"], OMP_NUM_THREADS="2").returncode == 0
    assert [event["from_step"] for event in launch.events(run, "resume")] == [1]
    assert launch.losses(run) == losses
    assert launch.parameter_hash(run, 8) == weights


@pytest.mark.slow
def test_dropout_resumes_bit_identically_too(tiny_data: Path, tmp_path: Path) -> None:
    more = ("--dropout=0.2", "--max_steps=12")
    _train(_flags(tiny_data, tmp_path / "straight", *more))
    flags = _flags(tiny_data, tmp_path / "cut", *more)
    assert launch.train_in_forks(flags, FAULT="step:kill9@7").returncode != 0
    _train([*flags, "--resume=latest"])
    runs = [tmp_path / name / "run" for name in ("straight", "cut")]
    assert launch.losses(runs[0]) == launch.losses(runs[1])


@pytest.mark.slow
def test_resume_on_fewer_processes_sees_the_same_tokens(
    straight: Callable[[int], Path], tiny_data: Path, tmp_path: Path
) -> None:
    """4 -> 2 -> 1 processes: identical batches, losses to 1e-5 of the run that never stopped."""
    expected = straight(1)
    flags = _flags(tiny_data, tmp_path / "elastic", f"--max_steps={LAST}")
    for world, stop in ((4, 10), (2, 20), (1, None)):
        more = [f"--stop_after_steps={stop}"] if stop else []
        more += ["--resume=latest"] if world < 4 else []
        _train([*flags, *more], world=world)
    run = tmp_path / "elastic" / "run"
    assert [event["world_size"] for event in launch.events(run, "resume")] == [2, 1]
    assert {event["level"] for event in launch.events(run, "resume")} == {"same data"}
    found, wanted = launch.steps(run), launch.steps(expected)
    assert sorted(found) == list(range(1, LAST + 1))
    for step in found:
        assert found[step]["batch_hash"] == wanted[step]["batch_hash"]
        assert found[step]["loss"] == pytest.approx(wanted[step]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("world", "number"),
    [(1, signal.SIGINT)]
    + [
        pytest.param(world, number, marks=pytest.mark.slow)
        for world, number in [(1, signal.SIGTERM), (2, signal.SIGINT), (2, signal.SIGTERM)]
    ],
)
def test_a_signal_stops_at_a_step_that_is_saved(
    world: int, number: signal.Signals, tiny_data: Path, tmp_path: Path
) -> None:
    """All ranks agree on the step, it is on disk, and nothing is lost: the resumed run's steps have no hole."""
    flags = _flags(tiny_data, tmp_path, "--max_steps=100000", "--checkpoint_freq=0")
    flags += ["--eval_freq=0", "--sample_freq=0"]
    process, run = launch.start(flags, world=world), tmp_path / "run"
    try:
        launch.wait_for_step(process, run, 5)
        process.send_signal(number)
        process.communicate(timeout=launch.HANG_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    [stop] = launch.events(run, "stop")
    assert stop["reason"] == number.name
    assert stop["step"] == max(launch.steps(run))
    assert Path(stop["checkpoint"]).name == f"step_{stop['step']:08d}"
    [saved] = launch.events(run, "checkpoint")
    assert (saved["kind"], saved["step"]) == ("emergency", stop["step"])
    if world == 1:  # torchrun itself reports 1 for every stop by signal
        assert process.returncode == 0
    stop_at = stop["step"] + 2
    more = ["--resume=latest", f"--stop_after_steps={stop_at}"]
    _train([*flags, *more])  # one process goes on, whatever stopped
    assert sorted(launch.steps(run)) == list(range(1, stop_at + 1))


SAVE_POINTS = [
    "checkpoint.model.safetensors",
    "checkpoint.optim.safetensors",
    "checkpoint.state.json",
    "checkpoint.manifest.json",
    "checkpoint.before_rename",
]


@pytest.mark.parametrize(
    "point",
    [
        point if point == SAVE_POINTS[-1] else pytest.param(point, marks=pytest.mark.slow)
        for point in SAVE_POINTS
    ],
)
def test_kill_inside_a_save_leaves_the_previous_checkpoint(
    point: str, tiny_data: Path, tmp_path: Path
) -> None:
    flags = _flags(tiny_data, tmp_path, "--max_steps=8", "--checkpoint_freq=3", "--eval_freq=0")
    assert launch.train_in_forks(flags, FAULT=f"{point}:kill9@6").returncode != 0
    run = tmp_path / "run"
    assert [path.name for path in sorted(run.glob("step_*"))] == ["step_00000003"]
    assert list(run.glob(".tmp-*")), "the kill was meant to land inside the save"
    _train([*flags, "--resume=latest"])
    assert [event["from_step"] for event in launch.events(run, "resume")] == [3]
    assert not list(run.glob(".tmp-*")), "leftovers are swept at the next start"


@pytest.mark.slow
def test_kill_right_after_the_rename_keeps_the_new_checkpoint(
    tiny_data: Path, tmp_path: Path
) -> None:
    flags = _flags(tiny_data, tmp_path, "--max_steps=8", "--checkpoint_freq=3", "--eval_freq=0")
    assert launch.train_in_forks(flags, FAULT="checkpoint.after_rename:kill9@6").returncode != 0
    _train([*flags, "--resume=latest"])
    assert [e["from_step"] for e in launch.events(tmp_path / "run", "resume")] == [6]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished-at-4-of-6 run that holds steps 2 and 4; copy before use."""
    folder = tmp_path_factory.mktemp("damaged")
    write_shards(folder / "data", train=(1003, 777), val=(650,))
    more = ("--max_steps=6", "--checkpoint_freq=2", "--eval_freq=0", "--stop_after_steps=4")
    _train(_flags(folder / "data", folder / "runs", *more))
    return folder


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optim.safetensors", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("place", [0.02, 0.5, 0.98])
def test_one_flipped_bit_is_found_and_the_previous_checkpoint_used(
    name: str, place: float, two_checkpoints: Path, tmp_path: Path
) -> None:
    """The damage is named and kept for inspection, whichever file it hit and wherever."""
    from gpt2lab.checkpoint import catalog

    run = tmp_path / "run"
    shutil.copytree(two_checkpoints / "runs" / "run", run)
    damaged = run / "step_00000004" / name
    content = bytearray(damaged.read_bytes())
    content[int(place * len(content))] ^= 0b100
    damaged.write_bytes(content)
    chosen, warnings = catalog.newest_valid(run, set_aside=True)
    assert chosen is not None
    assert chosen.step == 2
    [warning] = warnings
    assert str(damaged) in warning
    assert [path.name for path in run.glob("step_*")] == ["step_00000002"]
    assert len(list(run.glob("corrupt-step_00000004*"))) == 1


def test_a_resume_past_a_damaged_checkpoint_says_so_and_goes_on(
    two_checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(two_checkpoints / "runs", tmp_path / "runs")
    damaged = tmp_path / "runs" / "run" / "step_00000004" / "optim.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-7])
    _train(_flags(two_checkpoints / "data", tmp_path / "runs", "--max_steps=6", "--resume=latest"))
    run = tmp_path / "runs" / "run"
    assert [event["from_step"] for event in launch.events(run, "resume")] == [2]
    messages = [event["message"] for event in launch.events(run, "warning")]
    assert any("optim.safetensors" in message and "damaged" in message for message in messages)
    assert any("optim.safetensors" in line for line in capsys.readouterr().out.splitlines())


def test_resume_rejects_when_every_checkpoint_is_damaged(
    two_checkpoints: Path, tmp_path: Path
) -> None:
    """Starting over in silence would be the worst answer."""
    shutil.copytree(two_checkpoints / "runs", tmp_path / "runs")
    for path in (tmp_path / "runs" / "run").glob("step_*/model.safetensors"):
        path.write_bytes(b"")
    for resume in (
        "latest",
        "auto",
        "latest",
    ):  # what one start does must not change the next's mind
        flags = _flags(
            two_checkpoints / "data", tmp_path / "runs", "--max_steps=6", f"--resume={resume}"
        )
        with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
            resolve(parse(flags), world_size=1, set_aside=True)
