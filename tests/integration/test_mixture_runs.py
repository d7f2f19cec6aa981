"""Runs on a mixture: the same samples at any world size and after any stop, and losses that tell the sources apart."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import launch
from gpt2lab.commands.data import tokens_of_step
from gpt2lab.config.mixture import read_sources
from gpt2lab.config.schema import DataConfig
from gpt2lab.config.settings import override
from gpt2lab.data.mixture import check_epochs
from gpt2lab.errors import ConfigError, DataError
from gpt2lab.planner.measuring import data_for
from gpt2lab.report.page import render
from gpt2lab.runs.summary import describe_run
from gpt2lab.tracking.tensorboard import rebuild_tensorboard
from launch import last
from tiny import TINY, VOCAB, flip_bit, parse, pretrain, resolved, write_shards

T, S, LAST = 16, 8, 24
CHANGE = "1700:0,0.2,0.8"  # tokens: in the middle of step 14
WEIGHTS = {"easy": 0.5, "hard": 0.5, "late": 0.0}
NAMES = list(WEIGHTS)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Return a folder of three sources: one that can be learned, one that cannot, one for the end."""
    folder = tmp_path_factory.mktemp("sources")
    for number, name in enumerate(NAMES):
        place = write_shards(folder / name, train=(1003, 777), val=(650,))
        for path in sorted(place.iterdir()):
            size = len(np.load(path))
            noise = np.random.RandomState(size).randint(0, VOCAB, size)
            jumps = noise if name == "hard" else np.full(size, 3 + number)
            np.save(path, (np.cumsum(jumps) % VOCAB).astype(np.uint16))
    return folder


def words(data: Path, **weights: float) -> list[str]:
    return ["--data_dir", *(f"{data / name}:{weight}" for name, weight in weights.items())]


def flags_of(data: Path, runs: Path, name: str, *more: str) -> list[str]:
    return [
        *(*TINY, "--n_layer=1", "--n_embd=16", "--max_lr=0.01", f"--checkpoint_dir={runs}"),
        *("--val_tokens=1000", "--eval_freq=12", "--checkpoint_freq=6", f"--max_steps={LAST}"),
        *(f"--run_name={name}", *words(data, **WEIGHTS), "--data_weights_at", CHANGE, *more),
    ]


def train(data: Path, runs: Path, name: str, *more: str, world: int = 1) -> Path:
    flags = flags_of(data, runs, name, *more)
    if world == 1:
        pretrain(parse(flags))
    else:
        launch.worked(launch.train_in_forks(flags, world=world))
    return runs / name


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory) -> Path:
    """Return a run of one process that was never stopped."""
    return train(data, tmp_path_factory.mktemp("runs"), "straight", "--use_tensorboard")


def hashes(run_dir: Path) -> dict[int, str]:
    return {step: event["batch_hash"] for step, event in launch.steps(run_dir).items()}


@pytest.mark.parametrize("worlds", [(1, 2, 4), *launch.slow(((4, 1, 2),))])
def test_one_two_and_four_ranks_continue_each_other(worlds, data, straight, tmp_path):
    """Stopped before, and resumed in the step after, the change of the weights."""
    for world, stop in zip(worlds, (13, 14, LAST), strict=True):
        ends = [] if stop == LAST else [f"--stop_after_steps={stop}"]
        run = train(data, tmp_path, "run", "--resume=auto", *ends, world=world)
        passes = launch.steps(run)[stop // 12 * 12]["epochs_by_source"]  # at the last evaluation
        assert f"after {passes['easy']:.2f} epochs" in describe_run(run)
    assert hashes(run) == hashes(straight)
    assert [event["changes"].get("data") for event in launch.events(run, "resume")] == [None] * 2
    for name in NAMES:
        found = [last(folder, "eval")["val_loss_by_source"][name] for folder in (run, straight)]
        assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_every_step_can_be_shown_with_its_sources(straight, data):
    """The batch is computed again from the run's records and compared with the logged hash."""
    early, late = tokens_of_step(straight, 1), tokens_of_step(straight, LAST)
    assert sorted({place.split(",")[0] for place in early.places}) == ["easy", "hard"]
    assert [place.split(",")[0] for place in late.places].count("late") in (6, 7)
    for step in (early, late):
        for window, place in zip(step.windows, step.places, strict=True):
            name, file, _, _, offset = place.replace(",", "").split()
            expected = np.load(data / name / file)[int(offset) : int(offset) + T + 1]
            assert np.array_equal(window, expected)
    said = launch.call("data", "show", "--run", straight, "--step", 1).stdout
    assert "--- sample 0: easy, tiny_train_000000.npy from token 0" in said


def test_a_moved_mixture_is_replayed_and_shown_with_its_own_weights_alone(straight, data, tmp_path):
    shutil.copytree(data, tmp_path / "moved")
    there = words(tmp_path / "moved", **WEIGHTS)
    replay = ("replay", straight, "--steps=13:15", *there)
    assert "bitwise as logged" in launch.call(*replay).stdout
    shown = launch.call("data", "show", "--run", straight, "--step", LAST, *there)
    assert "--- sample 191: late, tiny_train_000001.npy from token 80" in shown.stdout
    line = launch.rejected(launch.call(*replay[:-1], f"{tmp_path / 'moved' / 'late'}:0.5"))
    assert "not the data that straight was trained on (fingerprint" in line


def test_other_weights_are_other_data(data, tmp_path):
    train(data, tmp_path, "run", "--stop_after_steps=6")
    others = words(data, easy=0.5, hard=0.4, late=0.1)
    with pytest.raises(ConfigError, match=r"data \w+ -> \w+, data_dir .*hard:0.5 .*hard:0.4 "):
        train(data, tmp_path, "run", "--resume=latest", *others)
    train(data, tmp_path, "run", "--resume=latest", *others, "--allow_change=data")
    resumed = launch.steps(tmp_path / "run")[7]
    assert resumed["first_sample"] == 0  # as with any other data


def test_weights_that_lie_ahead_can_be_changed_and_nothing_is_read_again(data, tmp_path, straight):
    """Decided in the middle of a run, an annealing is the one that was planned from the start."""
    run = train(data, tmp_path, "run", "--data_weights_at", "2816:0,0,1", "--stop_after_steps=6")
    with pytest.raises(ConfigError, match=r"data_weights_at 2816:0,0,1 -> 1700.*--allow_change"):
        train(data, tmp_path, "run", "--resume=latest")
    allowed = ("--resume=latest", "--allow_change=data_weights_at")
    at_once = flags_of(data, tmp_path, "run", "--data_weights_at", f"{6 * S * T}:0,0,1", *allowed)
    assert set(resolved(at_once).changes) == {"data_weights_at"}
    train(data, tmp_path, "run", *allowed)
    assert (last(run, "resume")["level"], hashes(run)) == ("changed", hashes(straight))
    with pytest.raises(ConfigError, match="--allow_change data "):  # 600 tokens are long past
        more = ("--data_weights_at", "600:0,0,1", "--allow_change=data_weights_at")
        train(data, tmp_path, "run", "--resume=12", *more)


def test_events_tell_the_sources_apart(straight):
    begun, changed = launch.events(straight, "mixture")
    assert (begun["step"], begun["phase"], begun["weights"]) == (0, 0, WEIGHTS)
    assert (changed["step"], changed["phase"]) == (13, 1)  # the batch of step 14 has windows of it
    assert changed["weights"] == pytest.approx({"easy": 0, "hard": 0.2, "late": 0.8}, abs=1 / 4096)
    passes = last(straight, "step")["epochs_by_source"]
    windows = 1002 // T + 776 // T
    taken = {name: round(passes[name] * windows) for name in NAMES}
    assert sum(taken.values()) == LAST * S
    first = math.ceil(1700 / T)  # sample of the change
    assert taken["easy"] in (first // 2, first // 2 + 1)
    assert taken["late"] == pytest.approx(0.8 * (LAST * S - first), abs=1)


def test_the_headline_is_the_mean_by_the_first_weights(straight, data):
    """Each source's loss is what evaluate.py finds on its folder alone."""
    event = last(straight, "eval")
    losses, errors = event["val_loss_by_source"], event["val_loss_se_by_source"]
    assert event["val_loss"] == pytest.approx(sum(WEIGHTS[n] * losses[n] for n in NAMES), rel=1e-12)
    expected = math.hypot(*(WEIGHTS[n] * errors[n] for n in NAMES))
    assert event["val_loss_se"] == pytest.approx(expected, rel=1e-12)
    assert event["val_tokens"] == 3 * 320
    assert "| evaluating 960 tokens" in (straight / "log.txt").read_text()
    found = launch.ask("evaluate.py", straight, "--json", folder=straight.parent)
    for name in ("val_loss", "val_loss_se", "val_loss_by_source", "val_loss_se_by_source"):
        assert found[name] == event[name]
    for name in NAMES:
        alone = ("--val", data / name, "--val_tokens=320")
        found = launch.ask("evaluate.py", straight, *alone, "--json", folder=straight.parent)
        assert (found["val_loss"], found["val_loss_se"]) == (losses[name], errors[name])
        assert found["val_loss_by_source"] is None
    text = launch.ask("evaluate.py", straight, folder=straight.parent)
    assert f"easy           {losses['easy']:.4f} +- {errors['easy']:.4f}" in text


def test_curves_and_report_have_a_line_for_each_source(straight):
    rebuild_tensorboard(straight)  # its settings hold lists
    curves = EventAccumulator(str(straight / "tensorboard")).Reload()
    for name in NAMES:
        value = last(straight, "eval")["val_loss_by_source"][name]
        assert curves.Scalars(f"Loss/validation/{name}")[-1].value == pytest.approx(value, rel=1e-6)
        assert len(curves.Scalars(f"Training/epoch/{name}")) == LAST
    page = render(straight)
    table = page[page.index("Sources of the mixture") : page.index("Forecast and actual")]
    for name in NAMES:
        assert f">{name}<" in table
        assert f"{last(straight, 'eval')['val_loss_by_source'][name]:.4f}" in table
    assert ">80.00%<" in table
    assert "on easy+hard+late" in page
    log = (straight / "log.txt").read_text()
    assert "mixture from step 14: 0.00% easy, 20.00% hard, 80.00% late" in log


def test_a_source_that_would_run_out_is_rejected_before_anything_is_written(data, tmp_path):
    with pytest.raises(ConfigError) as error:
        train(data, tmp_path, "run", "--max_source_epochs", "4", "late:0.5")
    assert str(error.value).startswith("late: this run takes 68 of its 110 windows, 0.62 passes, ")
    assert "--max_source_epochs allows 0.5; lower its weight" in str(error.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=r"easy: .* 3.49 passes, .* allows 3"):
        one = (f"--data_dir={data / 'easy'}", "--data_weights_at", "--max_steps=48")
        train(data, tmp_path, "run", *one, "--max_source_epochs=3")
    train(data, tmp_path, "run", "--max_source_epochs", "4", "late:0.7", "--stop_after_steps=1")
    order, easy = resolved(flags_of(data, tmp_path, "r")).order, data / "easy"
    exact = order.orders[0]
    sources = read_sources(DataConfig(data_dir=(str(easy),), max_source_epochs=("2",)))
    check_epochs(sources, exact, samples=2 * exact.windows_per_epoch)
    with pytest.raises(ConfigError):
        check_epochs(sources, exact, samples=2 * exact.windows_per_epoch + 1)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_damaged_shard_of_any_source_stops_the_run_with_its_name(split, tmp_path):
    for name in NAMES:
        write_shards(tmp_path / name, train=(1003, 777), val=(650,))
        assert launch.call("data", "import", tmp_path / name).returncode == 0
    path = tmp_path / "hard" / f"tiny_{split}_000000.npy"
    flip_bit(path)
    with pytest.raises(DataError, match=f"hard/{path.name}: damaged"):
        train(tmp_path, tmp_path / "runs", "run")
    assert not list((tmp_path / "runs" / "run").glob("step_*"))


def test_the_plan_says_how_often_each_source_is_read(data, tmp_path):
    done = launch.call(launch.TRAIN, *flags_of(data, tmp_path, "run"), "--dry_run", "--json")
    plan = json.loads(done.stdout)
    assert plan["epochs_by_source"]["late"] == pytest.approx(68 / 110)
    argv = ["--gpu=H100", "--n_layer=1", "--n_head=2", "--n_embd=16", f"--context_length={T}"]
    argv += [f"--vocab_size={VOCAB}", f"--total_batch_size={T * S}", "--mini_batch_size=2"]
    argv += [*words(data, **WEIGHTS), "--data_weights_at", CHANGE]
    found = launch.ask("estimate_time.py", *argv, f"--steps={LAST}", "--json", folder=tmp_path)
    assert found["dataset_info"]["epochs_by_source"] == plan["epochs_by_source"]
    text = launch.ask("estimate_time.py", *argv, "--steps=200", folder=tmp_path)
    assert "passes over late: beyond about 4, repeated tokens teach little" in text
    # Measuring trains on the mixture itself.
    config = parse(flags_of(data, tmp_path, "run")).config
    before = sorted(tmp_path.iterdir())
    assert override(config, data_for(config, tmp_path)).data == config.data
    assert sorted(tmp_path.iterdir()) == before
    elsewhere = parse(flags_of(tmp_path / "nowhere", tmp_path, "run")).config
    made = override(elsewhere, data_for(elsewhere, tmp_path)).data
    assert (made.data_dir, made.data_weights_at) == ((str(tmp_path / "data"),), ())


def test_a_source_that_is_read_many_times_is_worth_less(tmp_path):
    """The forecast of the loss counts repeats source by source, not over all folders together."""
    for name, size in (("small", 200_000), ("large", 3_000_000)):
        write_shards(tmp_path / name, train=(size,), val=(2000,))
    common = ["--gpu=H100", "--model=gpt2", "--tokens=3M", "--total_batch_size=16384"]

    def loss(*weights: float) -> float:
        pairs = zip(("small", "large"), weights, strict=True)
        folders = [f"{tmp_path / name}:{weight}" for name, weight in pairs]
        argv = [*common, "--mini_batch_size=16", "--data_dir", *folders, "--json"]
        return launch.ask("estimate_time.py", *argv, folder=tmp_path)["loss"]["value"]

    assert loss(0.9, 0.1) > loss(0.06, 0.94)
