"""Every rejection: exit code 2, one line on stderr, no traceback, and nothing written.

The full lines are in `tests/golden/messages.json`. To record a new wording:

    UPDATE_GOLDEN=1 pytest -n 0 tests/unit/commands/test_bad_input.py
"""

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

import launch
from corpora import snapshot
from gpt2lab.checkpoint import catalog
from gpt2lab.checkpoint.manifest import Draft, commit
from gpt2lab.config.settings import override, to_flat
from gpt2lab.data.shards import open_data
from gpt2lab.distributed import runtime
from gpt2lab.errors import GPT2LabError
from gpt2lab.model.gpt import empty_model
from gpt2lab.runs.history import open_log, read_log
from gpt2lab.training import pretrain as pretraining
from launch import TRAIN
from tiny import CONTEXT, TINY, VOCAB, parse, pretrain, resolved, write_shards
from whole_run import facts_of

# In a working directory with good data in `data`; the run would go to `runs/r`.
DATA, RUN_DIR = Path("data"), Path("runs", "r")
FLAGS = [*TINY, "--max_steps=20", "--data_dir=data", "--checkpoint_dir=runs", "--run_name=r"]
NAMELESS = [flag for flag in FLAGS if not flag.startswith("--run_name")]
ENDLESS = [flag for flag in FLAGS if not flag.startswith("--max_steps")]


@dataclass(frozen=True)
class Case:
    """The flags, and what is wrong with the folder."""

    argv: list[str]
    spoil: Callable[[], object] = lambda: None
    flags: list[str] = field(default_factory=lambda: FLAGS)


def write_shard(tokens: np.ndarray) -> None:
    np.save(DATA / "tiny_train_000001.npy", tokens)


def at_step_5(**changes: object) -> None:
    """Commit what the trainer would: a checkpoint with the settings of FLAGS and with this data."""
    start = resolved(FLAGS)
    config = override(start.config, changes)
    weights = {name: p.data for name, p in empty_model(config.model).named_parameters()}
    facts = facts_of(5, config=to_flat(config), data_fingerprint=start.data.fingerprint)
    files = {"model.safetensors": [safetensors.torch.save(weights)]}
    RUN_DIR.mkdir(parents=True, exist_ok=True)
    commit(RUN_DIR, Draft(5, files, facts))


def damaged_checkpoint() -> None:
    at_step_5()
    path = RUN_DIR / "step_00000005" / "model.safetensors"
    path.write_bytes(b"x" * path.stat().st_size)


def other_data() -> None:
    at_step_5()
    write_shard(np.zeros(400, dtype=np.uint16))


CASES = {
    # data
    "data folder missing": Case(["--data_dir=nowhere"]),
    "data folder of an unknown user": Case(["--data_dir=~no_such_user/data"]),
    "data folder empty": Case([], lambda: [path.unlink() for path in DATA.iterdir()]),
    "data folder is a file": Case(["--data_dir=data/tiny_val_000000.npy"]),
    "shard of floats": Case([], lambda: write_shard(np.zeros(400, np.float32))),
    "shard shorter than a window": Case([], lambda: write_shard(np.zeros(CONTEXT, np.uint16))),
    "validation shorter than a window": Case(["--context_length=200", "--total_batch_size=400"]),
    "id beyond the vocabulary": Case([], lambda: write_shard(np.full(400, VOCAB, np.uint16))),
    "vocabulary too small for the data": Case(["--vocab_size=100"]),
    # flags and settings
    "unknown flag": Case(["--n_layr=3"]),
    "unknown preset": Case(["--model=gpt5"]),
    "several settings wrong": Case(["--n_head=3", "--seed=-1", "--log_freq=0"]),
    "batch does not divide": Case(["--total_batch_size=130"]),
    "batch smaller than a micro-batch": Case(["--total_batch_size=16"]),
    "less than one step": Case(["--max_tokens=127"], flags=ENDLESS),
    "warm-up longer than the run": Case(["--warmup_steps=21"]),
    "float16": Case(["--dtype=float16"]),
    "bf16 without the hardware": Case(["--dtype=bf16"]),
    "no rank": Case(["--gpus=0"]),
    "ranks for a list": Case(["--gpus=2", "--list_checkpoints"]),
    "a batch that ranks cannot share": Case(["--gpus=3"]),
    "fsdp for one process": Case(["--parallel=fsdp"]),
    "zero1 for one process": Case(["--parallel=zero1", "--resume=latest"], at_step_5),
    "unknown way to share": Case(["--parallel=zero3"]),
    "exact sums under fsdp": Case(["--parallel=fsdp", "--reduce=exact"]),
    "offload without fsdp": Case(["--fsdp_offload"]),
    "gathering in bf16 without fsdp": Case(["--fsdp_param_dtype=bf16"]),
    "a GPU's kernel on a CPU": Case(["--attention=cudnn"]),
    "bucket of half a MiB": Case(["--ddp_bucket_mb=0.5"]),
    "bucket beyond all memory": Case(["--ddp_bucket_mb=1e15"]),
    "timeout of nothing": Case(["--pg_timeout_minutes=0"]),
    "stop before the first step": Case(["--stop_after_steps=0"]),
    # checkpoints
    "folder that is not UTF-8": Case(["--checkpoint_dir=runs\udcff"]),
    "file where the runs should go": Case([], lambda: Path("runs").write_text("in the way")),
    "run exists already": Case([], at_step_5),
    "auto without a name": Case(["--resume=auto"], flags=NAMELESS),
    "latest of a run without checkpoints": Case(["--resume=latest"]),
    "latest of no run": Case(["--resume=latest"], flags=NAMELESS),
    "best of none": Case(["--resume=best"]),
    "step that is not there": Case(["--resume=7"], at_step_5),
    "step of 5,000 digits": Case([f"--resume={'7' * 5000}"], at_step_5),
    "folder of a run": Case(["--resume=runs/r"], at_step_5, flags=NAMELESS),
    "folder that is not there": Case(["--resume=runs/x/step_00000005"]),
    "step that is damaged": Case(["--resume=5"], damaged_checkpoint),
    "stop at a step already done": Case(["--resume=latest", "--stop_after_steps=5"], at_step_5),
    "another architecture": Case(
        ["--resume=latest", "--n_layer=3", "--allow_change=n_layer,n_embd"], at_step_5
    ),
    "another shape": Case(
        ["--resume=latest", "--n_embd=48", "--vocab_size=300", "--context_length=8"], at_step_5
    ),
    "another rate": Case(["--resume=latest", "--max_lr=0.5"], at_step_5),
    "a longer run": Case(["--resume=latest", "--max_steps=30"], at_step_5, flags=ENDLESS),
    "other data": Case(["--resume=latest"], other_data),
    "compilation under dropout": Case(
        ["--resume=latest", "--dropout=0.1", "--compile=on"], lambda: at_step_5(dropout=0.1)
    ),
    "micro-batch under dropout": Case(
        ["--resume=latest", "--dropout=0.1", "--mini_batch_size=4"], lambda: at_step_5(dropout=0.1)
    ),
}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_shards(DATA, train=(400, 300), val=(150,))
    return tmp_path


@pytest.fixture(autouse=True)
def _no_native_bf16(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(runtime, "fastest_dtype", lambda device: "fp32")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        assert signal.getsignal(number) is handler, "a rejected start left its signal handler"


# A dry run says the same.
DRY_TOO = {
    *("data folder missing", "id beyond the vocabulary", "several settings wrong"),
    *("batch does not divide", "run exists already", "latest of no run", "another rate"),
    "file where the runs should go",
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_rejected_in_one_line_and_nothing_is_written(name, place, wording):
    case = CASES[name]
    case.spoil()
    before = snapshot(place)
    done = launch.call(TRAIN, *case.flags, *case.argv)
    assert (done.returncode, done.stdout) == (2, "")
    wording(done.stderr)
    if name in DRY_TOO:
        assert launch.call(TRAIN, *case.flags, *case.argv, "--dry_run") == done
    assert snapshot(place) == before


def test_the_flags_of_these_tests_are_good_ones(place):
    assert resolved(FLAGS).plan.max_steps == 20
    at_step_5()
    resumed = resolved([*FLAGS, "--resume=latest"])
    assert (resumed.checkpoint.step, set(resumed.changes)) == (5, set())
    assert open_data(DATA, vocab_size=VOCAB).tokens("train") == 700


def test_of_many_processes_only_the_first_prints_a_rejection(place, monkeypatch):
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        done = launch.call(TRAIN, *FLAGS, "--n_head=3", "--dry_run", folder=place)
        assert (done.returncode, done.stderr.count("\n")) == (2, lines)


BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "wrong",
    [
        *("RANK=x", "RANK=2", "WORLD_SIZE=x", "MASTER_ADDR=", "MASTER_PORT=x"),
        *("LOCAL_RANK=", "MASTER_PORT=65536", f"WORLD_SIZE={'9' * 20}"),
    ],
)
def test_a_rank_started_by_hand_names_what_it_lacks(place, monkeypatch, wrong):
    name, _, value = wrong.partition("=")
    for known, good in {**BY_HAND, name: value}.items():
        monkeypatch.setenv(known, good)
    before = snapshot(place)
    done = launch.call(TRAIN, *FLAGS)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert wrong in done.stderr
    assert snapshot(place) == before


def test_a_rank_that_waits_for_others_says_where(monkeypatch):
    """A meeting that never comes takes 10 minutes of torch's; here it comes with the first line."""
    told, lines = threading.Event(), []
    for name, value in BY_HAND.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pretraining, "_ALONE_SECONDS", 0.01)
    monkeypatch.setattr(pretraining, "say", lambda line: (lines.append(line), told.set()))
    monkeypatch.setattr(pretraining, "Runtime", lambda **_: told.wait(60))
    pretraining._join(parse(FLAGS))
    assert lines[0] == "rank 1 waits for all 2 ranks at 127.0.0.1:29500: 0 s so far"


def test_a_name_that_is_not_plain_and_a_verb_without_effect_are_rejected(place):
    for name in ("a/b", "/tmp/abs_run", "", "..", "-x", "a\nb", "a\x1b[2J"):
        with pytest.raises(GPT2LabError, match="plain folder name"):
            resolved([*NAMELESS, f"--run_name={name}"])
    for argv in (
        *(["--json"], ["--allow_change=max_lr"], ["--resume=auto", "--allow_change=bogus"]),
        ["--resume=\u00b2"],  # a digit to str.isdigit, but not to int
    ):
        with pytest.raises(GPT2LabError):
            resolved([*FLAGS, *argv])


def test_another_batch_needs_the_length_in_steps(tmp_path, tiny_data):
    """An epoch of another batch has another number of steps, and the ones done count for more or less."""
    place = [f"--data_dir={tiny_data}", f"--checkpoint_dir={tmp_path}"]
    flags = [*ENDLESS, *place, "--num_epochs=1"]
    pretrain(parse([*flags, "--stop_after_steps=10"]))
    more = [*flags, "--resume=latest", "--total_batch_size=384"]
    with pytest.raises(GPT2LabError, match="--max_steps N"):
        pretrain(parse([*more, "--allow_change=total_batch_size"]))
    more.remove("--num_epochs=1")
    pretrain(parse([*more, "--max_steps=12", "--allow_change=total_batch_size,max_steps"]))
    steps = launch.steps(tmp_path / "r")
    assert [steps[step]["tokens"] for step in (10, 11, 12)] == [1280, 1664, 2048]


@pytest.mark.parametrize("line", ["5", "{}", "[]", "[" * 100_000])
def test_a_metrics_line_that_is_no_event_is_named(tmp_path, line):
    good = '{"event": "step", "time": 1.0, "attempt": 1, "step": 1}'
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{line}\n")
    assert "line 2: " in str(open_log(tmp_path).problem)
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n")
    with pytest.raises(GPT2LabError, match="line 1: "):
        read_log(tmp_path)


def test_an_odd_label_is_passed_over(tmp_path):
    (tmp_path / "labels" / "a_folder").mkdir(parents=True)
    (tmp_path / "labels" / "best").write_bytes(b"\xff\xfe")
    assert catalog.list_checkpoints(tmp_path) == ([], [])
