"""TensorBoard files: what --use_tensorboard writes during a run, and what runs rebuild-tensorboard makes of its log."""

import contextlib
import math
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

import launch
from ecosystem import works_with
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import find_problems, override
from gpt2lab.errors import ConfigError
from gpt2lab.runs.folder import RunFolder
from gpt2lab.tracking.tensorboard import TensorBoard
from launch import ask, steps
from plain_log import current_events, read_events
from tiny import parse, pretrain
from whole_run import SCALARS


def open_tensorboard(run_dir: Path) -> EventAccumulator:
    everything = {"histograms": 0, "scalars": 0, "tensors": 0}
    return EventAccumulator(str(run_dir / "tensorboard"), size_guidance=everything).Reload()


def test_tensorboard_mirrors_metrics_under_the_promised_tags(tiny_flags, tmp_path):
    works_with("tensorboard", version("tensorboard"), "curves, texts and settings read back")
    more = ["--vocab_size=50304", "--max_steps=4", "--eval_freq=2", "--sample_freq=2"]
    pretrain(parse([*tiny_flags, *more, "--sample_tokens=4", "--use_tensorboard"]))
    run_dir = tmp_path / "runs" / "tiny"
    written, events = open_tensorboard(run_dir), read_events(run_dir)
    for tag, (kind, field, factor) in SCALARS.items():
        of_kind = [line for line in events if line["event"] == kind and line[field] is not None]
        expected = {line["step"]: line[field] * factor for line in of_kind}
        mirrored = {scalar.step: scalar.value for scalar in written.Scalars(tag)}
        assert expected, tag
        assert mirrored == pytest.approx(expected, rel=1e-6), tag
    shown = written.Tensors("Generated_Samples/text/text_summary")
    texts = {text.step: text.tensor_proto.string_val[0].decode() for text in shown}
    assert texts == {line["step"]: line["text"] for line in events if line["event"] == "sample"}
    assert set(texts) == {2, 4}
    (table,) = written.Tensors("hparams/text_summary")
    assert "| n_embd | 32 |" in table.tensor_proto.string_val[0].decode()
    plugin = written.summary_metadata["_hparams_/session_start_info"].plugin_data
    data = plugin_data_pb2.HParamsPluginData.FromString(plugin.content)
    settings = data.session_start_info.hparams
    assert (settings["n_embd"].number_value, settings["dtype"].string_value) == (32, "fp32")


def test_histograms_of_weights_and_gradients_change_no_bit(tiny_flags, tmp_path):
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
    tags = [tag for tag in expected if tag.startswith("Gradients/")]
    squares = [written.Histograms(tag)[-1].histogram_value.sum_squares for tag in tags]
    norm = launch.steps(watched)[4]["grad_norm"]
    assert math.sqrt(sum(squares)) == pytest.approx(min(norm, 1.0), rel=1e-4)


def recorded(run_dir: Path, weights: dict[str, torch.Tensor], *events: Any) -> EventAccumulator:
    """Return what the extension writes of some events of a fresh run."""
    config = override(Config(), {"use_tensorboard": True, "histogram_freq": 1})
    start = SimpleNamespace(config=config, run_dir=run_dir, plan=SimpleNamespace(max_steps=1))
    model = SimpleNamespace(named_parameters=weights.items)
    state = SimpleNamespace(step=0)
    run: Any = SimpleNamespace(start=start, components=SimpleNamespace(model=model, state=state))
    tensorboard = TensorBoard()
    tensorboard.started(run)
    for event, step in events:
        tensorboard.recorded({"event": event, "step": step, "loss": 2.0}, None)
    tensorboard.ended(None, None)
    return open_tensorboard(run_dir)


def test_steps_after_a_rewind_replace_those_before_it(tmp_path):
    steps = [("step", n) for n in (1, 2, 3)]
    written = recorded(tmp_path, {}, *steps, ("rewind", 1), *steps[1:])
    assert [scalar.step for scalar in written.Scalars("Loss/train")] == [1, 2, 3]


def test_a_tensor_with_nan_or_one_value_has_an_honest_histogram(tmp_path):
    weights = {"nan": torch.tensor([1.0, math.nan]), "infinite": torch.tensor([1.0, math.inf])}
    weights["same"] = torch.full((3, 2), 2.0)
    written = recorded(tmp_path, weights, ("step", 1))
    assert written.Tags()["histograms"] == ["Parameters/same"]
    (event,) = written.Histograms("Parameters/same")
    found = event.histogram_value
    assert (found.min, found.max, found.sum, found.sum_squares) == (2, 2, 12, 24)
    assert (found.num, sum(found.bucket)) == (6, 6)


def test_histograms_without_tensorboard_are_rejected(tiny_flags, tmp_path):
    with pytest.raises(ConfigError, match="histogram_freq 5 needs --use_tensorboard"):
        pretrain(parse([*tiny_flags, "--histogram_freq=5"]))
    assert not (tmp_path / "runs").exists()
    sharded = {"histogram_freq": 5, "use_tensorboard": True, "parallel": "fsdp"}
    assert "needs full tensors" in find_problems(override(Config(), sharded))[0]


def test_run_writes_no_tensorboard_files_unless_asked(tiny_flags, tmp_path):
    pretrain(parse([*tiny_flags, "--max_steps=1"]))
    assert not (tmp_path / "runs" / "tiny" / "tensorboard").exists()


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return {tag: its (step, value)}; of texts, the steps."""
    read = EventAccumulator(str(folder)).Reload()
    tags = read.Tags()
    found = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in tags["scalars"]}
    found |= {tag: [(e.step, 0.0) for e in read.Tensors(tag)] for tag in tags["tensors"]}
    return {tag: values for tag, values in found.items() if values}  # a resume empties some


@pytest.fixture
def run_dir(tmp_path, tiny_flags) -> Path:
    """Return a run of four steps that was stopped after three, went back to step 2, and was mirrored all along."""
    flags = [*tiny_flags, "--vocab_size=50304", "--sample_tokens=2", "--use_tensorboard"]
    flags += ["--max_steps=4", "--checkpoint_freq=1", "--eval_freq=1", "--sample_freq=2"]
    pretrain(parse([*flags, "--stop_after_steps=3"]))
    time.sleep(1.1)  # TensorBoard orders a run's files by the second in their name
    pretrain(parse([*flags, "--resume=2"]))
    return tmp_path / "runs" / "tiny"


def test_steps_taken_again_are_replaced_and_the_mirror_rebuilt_point_for_point(run_dir, tmp_path):
    """With the times of the events."""
    own = points(run_dir / "tensorboard")
    assert [step for step, _ in own["Loss/train"]] == [1, 2, 3, 4]
    assert [step for step, _ in own["Loss/validation"]] == [0, 1, 2, 3, 4]
    current = current_events(read_events(run_dir), "step")
    assert [current[n]["attempt"] for n in (1, 2, 3, 4)] == [1, 1, 2, 2]
    milliseconds = dict(own["Performance/step_time_ms"])[3]
    assert milliseconds == pytest.approx(1000 * current[3]["step_seconds"], rel=1e-6)
    assert "tensorboard: 11 events" in ask("runs rebuild-tensorboard", "tiny", folder=tmp_path)
    assert points(run_dir / "tensorboard") == own
    (file,) = (run_dir / "tensorboard").iterdir()
    read = EventAccumulator(str(file)).Reload()
    times = [event["time"] for event in steps(run_dir).values()]
    assert [e.wall_time for e in read.Scalars("Loss/train")] == times
    assert not [path for path in run_dir.iterdir() if path.name.startswith(".")]


def test_a_run_that_goes_on_is_left_alone_and_what_is_no_run_rejected(run_dir, tmp_path):
    before = sorted((run_dir / "tensorboard").iterdir())
    with contextlib.closing(RunFolder(run_dir)):
        code, line = ask("runs rebuild-tensorboard", "tiny", folder=tmp_path)
    assert (code, "in use by process" in line) == (2, True)
    assert sorted((run_dir / "tensorboard").iterdir()) == before
    (tmp_path / "runs" / "empty").mkdir()
    assert "not the folder of a run" in ask("runs rebuild-tensorboard", "empty", folder=tmp_path)[1]
    assert list((tmp_path / "runs" / "empty").iterdir()) == []


@pytest.mark.slow
def test_the_files_are_those_of_rank_zero_alone(tiny_run):
    """TensorBoard looks at gradients before each update, and the other ranks have none of its files."""
    run = tiny_run()
    flags = [*run.flags, "--max_steps=2", "--use_tensorboard", "--histogram_freq=1"]
    done = launch.worked(launch.train_in_forks(flags, world=2))
    assert "has ended" not in done.stdout + done.stderr
    assert list((run.path / "tensorboard").iterdir())
