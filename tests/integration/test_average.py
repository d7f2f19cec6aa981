"""`gpt2lab runs average`: the mean of a run's checkpoints as a run that says so."""

import json
import resource

import pytest
import safetensors.numpy

import launch
from gpt2lab.checkpoint import catalog, manifest
from gpt2lab.commands.average import main
from gpt2lab.errors import GPT2LabError
from tiny import evaluated
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


def test_what_cannot_be_averaged_is_one_line_and_nothing_written(run, tmp_path):
    place = f"--checkpoint_dir={run.path.parent}"
    before = sorted(run.path.parent.iterdir())
    for last in ("0", "1", "5", "-2"):
        assert "of tiny are 2, 4, 6, 8; an average takes 2" in rejected(
            "tiny", f"--last={last}", place
        )
    assert "no run of this name" in rejected("nobody", "--last=2", place)
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
