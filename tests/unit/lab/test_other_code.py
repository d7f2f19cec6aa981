"""`ablate --code`: commits get their own runs with their own code, changes of no bit get no seeds; what it rejects."""

import json
import re
import signal
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

import launch
from benchmarks.planted_changes import GPT, git, plant
from gpt2lab import paths
from gpt2lab.commands import ablate
from gpt2lab.config.request import RunRequest
from gpt2lab.errors import CheckError, ConfigError, SavedInterrupt
from gpt2lab.lab import other_code
from gpt2lab.lab.other_code import find_commits
from gpt2lab.lab.seed_runs import Setting
from gpt2lab.runs import history
from tiny import TINY

SETTINGS = "src/gpt2lab/config/schema.py"
FREE = '    deterministic: bool = free(\n        False, "CUDA'
TRAIN = "src/gpt2lab/commands/train.py"
BROKEN = {
    # A flag that this program has not, another name of one, code that does not start or breaks, another log.
    "more": (SETTINGS, FREE, f'    louder: bool = free(False, "x")\n{FREE}'),
    "late": (
        TRAIN,
        "    try:\n        pre",
        "    raise SystemExit('error: too late')\n    try:\n        pre",
    ),
    "never": ("src/train.py", "import signal\n", "raise SystemExit('error: not today')\n"),
    "log": ("src/gpt2lab/runs/events.py", "% zlib.crc32(body)", "% (zlib.crc32(body) ^ 1)"),
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = plant(tmp_path_factory.mktemp("git") / "repository")
    for branch, (file, old, new) in BROKEN.items():
        git(repository, "checkout", "-qb", branch, "main")
        text = (repository / file).read_text()
        assert old in text
        (repository / file).write_text(text.replace(old, new))
        git(repository, "commit", "-qam", branch)
    git(repository, "checkout", "-q", "main")
    return repository


@pytest.fixture
def repository(planted: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(planted)
    return planted


@pytest.fixture
def flags(tiny_data: Path, tmp_path: Path) -> list[str]:
    own = ("--max_steps=2", "--n_layer=1", "--n_embd=16", "--max_lr=0.01", "--seeds=1", "--json")
    return [*TINY, *own, f"--data_dir={tiny_data}", f"--out={tmp_path / 'out'}"]


def assert_nothing_is_left(repository: Path, out: Path) -> None:
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert list(out.parent.glob(f".{out.name}.*")) == []


@pytest.mark.parametrize(
    ("refs", "says"),
    [
        ("main ropes", r"^ropes: no branch, tag or commit of .*repository; did you mean rope\?$"),
        ("main .", r"^code-main and code-\. are the same commit"),
        ("main main", r"^--code: main is duplicated$"),
        ("main more", r"^setting code-more: the code of \w{12} has other flags than .*: --louder;"),
        ("main never", r"^setting code-never: the code of \w{12}: error: not today$"),
        ("main rope --n_head=3", r"^setting code-main: the code of \w{12}: error: .*n_head 3"),
        ("main", "^nothing to compare: .* --code main my-branch$"),
        *launch.slow(
            ("main late", "code-late_seed1 failed with exit code 1: error: too late"),
            ("main log", "log_seed1: its code writes a log that this program cannot read: .*line"),
        ),
    ],
)
def test_code_that_cannot_be_compared_is_named(refs, says, repository, flags, tmp_path):
    with pytest.raises(CheckError if "seed1" in says else ConfigError, match=says):
        ablate.main([*flags, "--code", *refs.split()])
    assert_nothing_is_left(repository, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_changes_that_nobody_committed_are_named(repository, flags, tmp_path, monkeypatch):
    """`.` takes them: one commit for one content, which no branch, index or work tree knows of."""
    (repository / "src" / "gpt2lab" / "new.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match=r"has 1 changed file in no commit, such as src/gpt2lab/"):
        ablate.main(["--code", "main", "rope", *flags])
    assert find_commits(["rope", "harm"])[0] == repository  # neither is checked out
    _, commits = find_commits(["main", "."])
    assert find_commits(["."])[1]["."] == commits["."]
    changed = git(repository, "diff", "--name-only", commits["main"], commits["."])
    assert changed == "src/gpt2lab/new.py"
    assert git(repository, "status", "--porcelain") == "?? src/gpt2lab/new.py"
    (repository / "src" / "gpt2lab" / "new.py").unlink()
    assert find_commits(["."])[1]["."] == commits["main"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(paths, "REPOSITORY", tmp_path)
    with pytest.raises(ConfigError, match="in a git repository of gpt2lab, which other code comes"):
        ablate.main(["--code", "main", "rope", *flags])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="git: not found in PATH"):
        ablate.main(["--code", "main", "rope", *flags])


@pytest.mark.slow
def test_a_change_of_a_bit_goes_to_the_seeds(repository, flags, tmp_path, capfd, monkeypatch):
    """As settings of a file; started again it trains nothing, and takes neither other settings nor other code."""
    monkeypatch.setattr(other_code, "_MEASURES", ("--", "src/gpt2lab/model"))
    file, out = tmp_path / "settings.txt", tmp_path / "out"
    file.write_text("base: @main\nmine: @harm\nhot: @main --max_lr=0.02\n")
    for _ in range(2):
        assert ablate.main([str(file), *flags]) == 0
        assert_nothing_is_left(repository, out)
    said = capfd.readouterr()
    assert said.err.count("short runs, turn 1 of 7: base and mine") == 1
    assert "turn 2" not in said.err
    assert "[3/3] hot_seed1: complete" in said.err
    found = json.loads(said.out.splitlines()[-1])
    assert [one["setting"] for one in found["comparisons"]] == ["mine", "hot"]
    mine = found["code"]["mine"]
    assert mine["sentences"][0].startswith("mine touches the arithmetic: loss of step 1 is ")
    assert mine["sentences"][1] == (
        f"mine measures its loss with other code than base: it changes 1 file, such as {GPT}."
    )
    assert (mine["verdict"], mine["changes_measurement"]) == ("not decided", [GPT])
    for name, ref in (("base", "main"), ("mine", "harm"), ("hot", "main")):
        commit = git(repository, "rev-parse", ref)
        run = json.loads((out / f"{name}_seed1" / "run.json").read_text())
        assert run["provenance"]["git"] == commit == found["code"][name]["commit"]
    with pytest.raises(ConfigError, match=r"code.json: the runs there began with other commits or"):
        ablate.main([str(file), *flags, "--max_lr=0.03"])
    file.write_text("base:\nmine: --max_lr=0.02\n")
    with pytest.raises(ConfigError, match="out has runs of other code; give another --out"):
        ablate.main([str(file), *flags])


@pytest.mark.slow
def test_changes_of_no_bit_get_no_seeds(repository, flags, tmp_path, capfd, monkeypatch):
    """12 short runs; what only surrounds a run is left out of them."""
    monkeypatch.setattr(other_code, "TURNS", 2)
    own = ["--max_steps=30", "--n_embd=32", "--use_tensorboard", "--hellaswag_freq=1"]
    own += ["--warmup_steps=25"]  # a whole run of 20 steps has its own
    assert ablate.main(["--code", "main", "slow", "refactoring", *flags, *own]) == 0
    assert_nothing_is_left(repository, tmp_path / "out")
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (found["settings"], found["comparisons"]) == ([], [])
    for name in ("code-slow", "code-refactoring"):
        one = found["code"][name]
        assert (one["verdict"], one["same_arithmetic"]) == ("equal bits", True)
        assert "have the bits of code-main. A step takes " in one["sentences"][0]
        assert one["changes_measurement"] == []
        assert [len(turns) for turns in one["step_seconds"].values()] == [other_code.TURNS] * 2
        assert min(one["peak_memory_bytes"].values()) > 2**26
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == ["ablation.json", "ablation.md", "code.json"]


def test_short_runs_may_have_one_step_and_are_not_kept(tmp_path, monkeypatch):
    launch.append(tmp_path, event="step", attempt=1, step=1, tokens=64, step_seconds=1.0)
    costs = other_code._costs("b", "a", dict.fromkeys("ab", [history.read_log(tmp_path)] * 2))
    assert (
        "arithmetic: the first 1 step, and a whole run of 20 steps, have" in costs["sentences"][0]
    )
    monkeypatch.setattr(other_code, "run_all", Mock(side_effect=SavedInterrupt("saved")))
    settings = dict.fromkeys("ab", Setting(RunRequest()))
    with pytest.raises(KeyboardInterrupt, match="the next start repeats all short runs"):
        other_code.compare_bits(settings, seed=1, place=tmp_path)


@pytest.mark.slow
def test_an_interrupt_leaves_no_worktree(repository, flags, tmp_path):
    command = [*launch.words_of("ablate"), "--code", "main", "harm", *flags, "--max_steps=100000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    for line in process.stderr:  # until the runs of the seeds
        if "[1/2] code-main_seed1: 100,000 steps" in line:
            break
    launch.wait_for_step(process, tmp_path / "out" / "code-main_seed1", 3)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate()[1]
    assert (process.returncode, "interrupted; what was trained is saved" in stderr) == (0, True)
    assert_nothing_is_left(repository, tmp_path / "out")


@pytest.mark.slow
def test_the_agent_loop_keeps_what_is_better(planted, tiny_data, tmp_path):
    """examples/agent_loop.md, whose agent first plants a harm, then a rate that is 30 times as high."""
    git(tmp_path, "clone", "-q", str(planted), "r")
    git(tmp_path / "r", "branch", "harm", "origin/harm")
    page = (launch.REPOSITORY / "examples" / "agent_loop.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    flags = [*TINY, "--max_steps=20", "--max_lr=0.0003", "--until_decided", "--max_seeds=4"]
    words = " ".join([*flags, f"--data_dir={tiny_data}"])
    script = script.replace("FLAGS =", f"FLAGS = {words!r} or")
    ours = '[*sys.argv[3].split("|"), *ask.split()[1:]]'
    (tmp_path / "agent_loop.py").write_text(script.replace("ask.split()", ours))
    agent = tmp_path / "r" / "agent"
    rate = "s/return optim.max_lr . (1.0/return 30 * optim.max_lr * (1.0/"
    agent.write_text(
        "#!/bin/sh\nwho='-c user.name=x -c user.email=x'\n"
        "[ -e trials.txt ] || exec git $who cherry-pick harm\n"
        f"sed -i '{rate}' src/gpt2lab/optim/schedule.py && git $who commit -qam rate\n"
    )
    agent.chmod(0o755)
    words = [tmp_path / "agent_loop.py", 2, 1e9, "|".join(launch.words_of("ablate")[:-1])]
    launch.worked(launch.python(*words, folder=tmp_path / "r"))
    said = (tmp_path / "r" / "trials.txt").read_text()
    first, second = re.findall(r"^trial \d: (.*)", said, flags=re.M)
    assert (first in ("worse", "not decided"), second) == (True, "better")
    assert "code-trial is better than code-best by " in said
    assert git(tmp_path / "r", "log", "-2", "--format=%s", "best") == "rate\nmain"
