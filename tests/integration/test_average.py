"""`gpt2lab runs average`: the mean of a run's checkpoints as a run that says so."""

import json
import resource
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import launch
from gpt2lab.checkpoint import catalog, manifest
from gpt2lab.commands.average import main
from gpt2lab.errors import GPT2LabError
from gpt2lab.runs.summary import describe_run
from gpt2lab.training import steps
from gpt2lab.training.extension import Extension, LiveRun
from gpt2lab.training.pretrain import pretrain
from tiny import evaluated, flags_for, parse, train
from whole_run import Run


@pytest.fixture(scope="module")
def run(tiny_run) -> Run:
    return tiny_run(max_steps=8, checkpoint_freq=2, eval_freq=0)


def rejected(*words: str) -> str:
    with pytest.raises(GPT2LabError) as error:
        main(list(words))
    return str(error.value)


def test_the_average_is_the_mean_of_the_last_weights_and_says_so(run, capsys):
    before = run.listing()
    place = f"--checkpoint_dir={run.path.parent}"
    assert main(["tiny", "--last", "3", "--json", place]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["average_of"] == {"run": "tiny", "steps": [4, 6, 8]}
    folder = run.path.parent / "tiny_average3"
    average, *parts = (
        safetensors.numpy.load_file(path / f"step_0000000{step}" / "model.safetensors")
        for path, step in ((folder, 8), (run.path, 4), (run.path, 6), (run.path, 8))
    )
    for name, tensor in average.items():
        mean = sum(part[name].astype("float64") for part in parts) / 3
        assert (tensor == mean.astype("float32")).all(), name
    (info,) = catalog.list_checkpoints(folder)[0]
    assert manifest.verify(info.path)["average_of"] == found["average_of"]
    assert (info.kind, info.val_loss, info.labels) == ("average", None, ())
    assert "average" in launch.call("runs list", "tiny_average3", place).stdout
    assert launch.call("runs verify", "tiny_average3", place).returncode == 0
    theirs = evaluated("tiny", run.path.parent).val_loss
    assert evaluated("tiny_average3", run.path.parent).val_loss not in (theirs, None)
    after = run.listing()
    assert {name: after[name] for name in before} == before
    assert "is there already" in rejected("tiny", "--last=3", place)
    longer = ("--resume=latest", "--max_steps=12", "--allow_change=max_steps", "--device=cpu")
    train(["--run_name=tiny_average3", place, *longer])
    assert [info.step for info in catalog.list_checkpoints(folder)[0]] == [8, 10, 12]
    assert "was it deleted" not in (folder / "metrics.jsonl").read_text()


def test_what_cannot_be_averaged_is_one_line_and_nothing_written(run, tmp_path):
    place = f"--checkpoint_dir={run.path.parent}"
    before = sorted(run.path.parent.iterdir())
    for last in ("0", "1", "5", "-2"):
        line = rejected("tiny", f"--last={last}", place)
        assert "of tiny are 2, 4, 6, 8; an average takes 2" in line
    assert "plain folder name" in rejected("tiny", "--last=2", "--run_name=a/b", place)
    weights = run.path / "step_00000006" / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + b"?")
    assert "sha256 does not match" in rejected("tiny", "--last=2", "--run_name=x", place)
    weights.write_bytes(kept)
    whole = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept) // 2, whole[1]))  # as a full disk
    assert "File too large" in rejected("tiny", "--last=2", place)
    resource.setrlimit(resource.RLIMIT_FSIZE, whole)
    assert sorted(run.path.parent.iterdir()) == before


TAIL = {"max_steps": 8, "checkpoint_freq": 1, "average_tail": 0.5}


def tensors(run: Run, step: int, file: str = "model") -> dict[str, np.ndarray]:
    folder = run.path / manifest.folder_name(step)
    return safetensors.numpy.load_file(folder / f"{file}.safetensors")


def means(run: Run, step: int) -> dict[str, np.ndarray]:
    return {k: v for k, v in tensors(run, step, "optim").items() if k.endswith("/average")}


def assert_mean_of(run: Run, first: int, last: int, *, at: int = 8) -> None:
    """The mean in the checkpoint of step `at` is that of the weights saved after steps `first` to `last`."""
    parts = [tensors(run, step) for step in range(first, last + 1)]
    found = means(run, at)
    assert {f"{name}/average" for name in parts[0]} == found.keys()
    for name in parts[0]:
        mean = np.mean([part[name] for part in parts], axis=0, dtype="float64")
        assert found[f"{name}/average"] == pytest.approx(mean, rel=1e-6, abs=1e-8), name


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (1, {"optimizer": "normuon"}),
        *launch.slow((2, {"parallel": "ddp"}), (2, {"parallel": "fsdp"})),
        *launch.slow((2, {"parallel": "zero1", "optimizer": "muon"})),
    ],
    ids=str,
)
def test_a_tail_is_the_mean_of_its_weights_changes_no_bit_and_resumes(tiny_run, world, more):
    plain = tiny_run(world=world, **{**TAIL, **more, "average_tail": 0})
    run = tiny_run(world=world, **TAIL, **more)
    assert run.bits()[:2] == plain.bits()[:2]
    assert not means(run, 4)
    assert_mean_of(run, 5, 8)
    cut = tiny_run()
    cut.train("--stop_after_steps=6", world=world, **TAIL, **more)
    cut.train("--resume=latest", world=world)
    assert cut.bits() == run.bits()
    [done], [done_again] = run.events("done"), cut.events("done")
    for name in ("val_loss", "val_loss_average"):
        assert done_again[name] == done[name]
    loss = done["val_loss_average"]
    place = f"--checkpoint_dir={run.path.parent}"
    assert main(["tiny", place]) == 0
    assert evaluated("tiny_average", run.path.parent).val_loss == pytest.approx(loss, rel=1e-5)
    assert loss != done["val_loss"]
    assert "val_loss_average" not in plain.events("done")[0]


def test_a_changed_tail_holds_no_step_before_it_and_none_is_missing(tiny_run):
    run = tiny_run()
    run.train("--stop_after_steps=6", **TAIL)
    assert_mean_of(run, 5, 6, at=6)
    longer = ("--resume=latest", "--max_steps=14", "--allow_change=max_steps")
    run.train(*longer, "--stop_after_steps=9")  # the tail begins after step 7 now
    assert not means(run, 7)
    assert_mean_of(run, 8, 9, at=9)
    run.train("--resume=latest", "--average_tail=0", "--stop_after_steps=10")
    assert not means(run, 10)
    assert "holds no mean" in rejected("tiny", f"--checkpoint_dir={run.path.parent}")
    run.train("--resume=latest", "--average_tail=1")
    assert_mean_of(run, 11, 14, at=14)
    assert run.checkpoints()[14].manifest["average_from"] == 10
    assert "with the mean of the last weights" in describe_run(run.path)


def test_the_weights_are_back_after_the_mean_is_measured(tiny_run):
    class Last(Extension):
        def started(self, run: LiveRun) -> None:
            self.model = run.components.model

    last, run = Last(), tiny_run()
    pretrain(parse([*run.flags, *flags_for(**TAIL)]), extensions=[last])
    saved = tensors(run, 8)
    assert all((saved[name] == p.numpy()).all() for name, p in last.model.state_dict().items())


def test_a_first_step_that_was_skipped_is_no_part_of_the_mean_and_resumes(tiny_run, monkeypatch):
    plain = steps.train_step

    def step(*args: Any, **kwargs: Any) -> Any:
        first = args[2].first_sample == 0
        return plain(*args, **kwargs | ({"accept": lambda *_: False} if first else {}))

    monkeypatch.setattr(steps, "train_step", step)
    flags = TAIL | {"average_tail": 1}
    run, cut = tiny_run(**flags), tiny_run()
    assert not tensors(run, 1, "optim")
    assert_mean_of(run, 2, 8)
    assert run.checkpoints()[8].manifest["average_from"] == 1
    cut.train("--stop_after_steps=1", **flags)
    assert "holds no mean" in rejected("tiny", f"--checkpoint_dir={cut.path.parent}")
    cut.train("--resume=latest")
    assert cut.bits() == run.bits()
    assert "val_loss_average" not in tiny_run(**flags | {"max_steps": 1}).events("done")[0]
