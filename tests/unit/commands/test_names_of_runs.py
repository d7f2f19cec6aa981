"""Names of runs: in full, `latest`, the beginning of one; misspelt, ambiguous, missing. The same for every command."""

import json
import shutil
from pathlib import Path

import pytest

import tiny
from gpt2lab import paths
from gpt2lab.checkpoint import catalog
from gpt2lab.errors import ConfigError
from gpt2lab.runs.target import find_folder, find_run, full_name
from launch import TRAIN, call, python, rejected, worked

# Every verb that takes a run; R stands for its name.
VERBS = (
    *("status R", "runs list R", "runs rm R", "runs archive R", "runs sync R --to trackio"),
    *("runs resume-command R", "runs rebuild-tensorboard R", "runs repair-log R", "report R"),
    *("plot R --out plot.png", "evaluate R --device=cpu", "chat R --device=cpu", "doctor R"),
    *("sample R --prompt=a --max_new_tokens=1 --device=cpu", "serve R --port=0 --device=cpu"),
    *("runs average R --last 2", "export R --out export", "compare R beta_1", "bisect beta_1 R"),
    *("compare R,beta_1 beta_1,beta_1", "replay R --steps 3", "why-spike R --step 3 --worst 1"),
    *("data show --run R --step 1", "estimate --run_name R"),
    "train --init_from R --device=cpu --dry_run --data_dir=data --total_batch_size=256 --max_steps=1",
    "finetune --init_from R --instructions demo --dry_run",
    "train --list_checkpoints --run_name R",
    "ablate --out out --init_from R --max_lr 1e-3 2e-3 --max_steps 1",
)
# What another test runs, or what needs a terminal or a network.
ONLY_REFUSED = ("runs average", "runs rm", "runs archive", "runs sync", "serve", "compare R,")
ONLY_REFUSED += ("ablate", "finetune")
TAKES_CHECKPOINTS = ("runs rm", "runs archive", "runs resume-command", "evaluate", "chat", "sample")
TAKES_CHECKPOINTS += ("serve", "export", "compare R ", "train --init_from", "finetune", "ablate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a checkout with the runs beta_1, its copy beta_10, and alpha, the latest."""
    folder = tmp_path_factory.mktemp("names")
    runs = folder / "checkpoints"
    tiny.write_shards(folder / "data", train=tiny.TRAIN_SHARDS, val=tiny.VAL_SHARDS)
    tiny.write_items(folder / "items.jsonl")
    for name in ("beta_1", "alpha"):
        words = tiny.flags_of(folder, name, f"--checkpoint_dir={runs}", "--keep_checkpoints=1")
        assert call(TRAIN, *words).returncode == 0
    shutil.copytree(runs / "beta_1", runs / "beta_10")
    (runs / "alpha.old").mkdir()  # holds no run
    return folder


ALL = """
import json, pathlib, sys
from gpt2lab import paths
from gpt2lab.commands import verbs
from gpt2lab.errors import GPT2LabError
found = {}
paths.REPOSITORY = pathlib.Path.cwd()
for words in json.loads(sys.argv[1]):
    try:
        found[" ".join(words)] = verbs.main(words)
    except GPT2LabError as error:
        found[" ".join(words)] = [error.exit_code, str(error)]
print(json.dumps([found, sorted({"torch", "huggingface_hub"} & sys.modules.keys())]))
"""


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        *(("aplha", ["alpha"]), ("beat", ["beta_"]), ("bet", ["beta_1", "beta_10"])),
        *(("nosuch", ["alpha", "beta_1", "beta_10"]), ("beta_1/step_9", ["step_00000004"])),
    ],
)
def test_every_verb_refuses_a_wrong_name_with_the_candidates_before_torch(folder, name, candidates):
    lines = [[word.replace("R", name) for word in verb.split()] for verb in VERBS]
    done = worked(python("-c", ALL, json.dumps(lines), folder=folder))
    found, imported = json.loads(done.stdout.splitlines()[-1])
    assert imported == []
    for words, (code, line) in found.items():
        assert (code, "\n" in line) == (2, False), words
        assert all(candidate in line for candidate in candidates), (words, line)


def test_a_verb_of_runs_says_that_a_checkpoint_is_none(folder):
    verbs = [verb for verb in VERBS if not verb.startswith(TAKES_CHECKPOINTS)]
    lines = [[word.replace("R", "beta_1@4") for word in verb.split()] for verb in verbs]
    found, _ = json.loads(worked(python("-c", ALL, json.dumps(lines), folder=folder)).stdout)
    line = "beta_1@4: a checkpoint, not a run; give checkpoints/beta_1"
    assert found == {" ".join(words): [2, line] for words in lines}


@pytest.mark.parametrize("verb", [verb for verb in VERBS if not verb.startswith(ONLY_REFUSED)])
def test_latest_and_the_beginning_of_a_name_mean_the_name(folder, verb, tmp_path, monkeypatch):
    here = Path(shutil.copytree(folder, tmp_path / "here"))
    monkeypatch.setattr(paths, "REPOSITORY", here)
    codes = set()
    for name in ("alpha", "latest", "al"):
        words = [word.replace("R", name) for word in verb.split()]
        done = call(words[0], *words[1:], folder=here)
        assert done.returncode in (0, 1), done.stderr
        codes.add(done.returncode)
        shutil.rmtree(here / "export", ignore_errors=True)
    assert len(codes) == 1


def test_a_run_is_deleted_without_a_question_only_by_its_full_name(folder, tmp_path):
    """The beginning of a name would mean another run once the first is gone."""
    shutil.copytree(folder / "checkpoints", tmp_path / "runs")
    for name in ("al", "latest"):
        assert call("runs rm", name, "--yes", "--checkpoint_dir=runs", folder=tmp_path)[0] == 2
    done = call("runs rm", "alpha@latest", "--checkpoint_dir=runs", folder=tmp_path)
    assert "give a step, or the run" in rejected(done)
    assert call("runs rm", "alpha", "--yes", "--checkpoint_dir=runs", folder=tmp_path)[0] == 0
    assert not (tmp_path / "runs" / "alpha").exists()


def test_a_name_means_the_same_run_to_every_command_in_every_folder(tmp_path, monkeypatch):
    runs, here = tmp_path / "runs", tmp_path / "here"
    of_r = runs / "r" / "step_00000002"
    for folder in (of_r, here / "r", here / "only_here"):
        folder.mkdir(parents=True)
    (runs / "gpt2-nano_1" / "step_00000002").mkdir(parents=True)
    catalog.set_label(runs / "r", "best", 2)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, meant in {
        # r is not here/r
        **dict.fromkeys(("r", "r@latest", "~/runs/r", str(runs / "r")), runs / "r"),
        **dict.fromkeys(("r/step_00000002", "r@2", "r@best", f"{runs}/r@2"), of_r),
        "./r": here / "r",
        "../runs/r": here / ".." / "runs" / "r",
        "only_here": here / "only_here",
        "gpt2-n": runs / "gpt2-nano_1",
        "gpt2-n/step_00000002": runs / "gpt2-nano_1" / of_r.name,
    }.items():
        assert (find_run(name, runs), find_folder(name, runs)) == (meant, meant)
    for name in ("hf:r", "gpt2", "hf:gpt2-n", "org/name"):  # on the Hub
        assert find_folder(name, runs) is None
    assert find_run("gpt2", runs) == runs / "gpt2-nano_1"  # a command that takes runs alone
    for name in ("r@2\n", "r@\uff12", f"r@{'9' * 5000}"):
        with pytest.raises((ConfigError, OSError)):
            find_folder(name, runs)
    for name in ("distilgpt2", "r/step_9", "gpt2-n@best", "../x", "out/ckpt.pt"):
        with pytest.raises(ConfigError):
            find_folder(name, runs)
    with pytest.raises(ConfigError):  # no readable checkpoint
        full_name("latest", runs)
