"""`gpt2lab VERB`: the same functions as the programs, in an instant, with help that fits a screen."""

import io
import re
import sys
from pathlib import Path

import pytest

import launch
from gpt2lab import __version__, paths
from gpt2lab.commands import verbs
from gpt2lab.commands.verbs import VERBS
from gpt2lab.errors import ConfigError
from launch import REPOSITORY, SCRIPTS
from tiny import TINY, write_shards

SOURCE = REPOSITORY / "src"
UNION = {"data", "ladder", "runs", "data tokenizer", "benchmark"}  # their verbs have the flags
EVERY = {**VERBS, **verbs.WITHIN, "runs list": VERBS["runs"]}


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return what a verb prints in this process, as its help does."""
    with pytest.raises(SystemExit) as end:
        verbs.main(list(argv))
    assert end.value.code == 0
    return capsys.readouterr().out


def test_every_script_runs_a_verb_and_lets_ctrl_c_end_it_while_modules_load():
    for path in SCRIPTS.glob("[!_]*.py"):
        (verb,) = re.findall(r'run\("(\S+)"\)', path.read_text())
        assert verb in VERBS
        first = [line for line in path.read_text().splitlines() if "import" in line][:2]
        assert first == ["import sys", "from _bootstrap import run"], path.name


def test_there_are_22_verbs_and_those_that_went_name_the_new_form(capsys):
    assert len(VERBS) == 22  # benchmark, which is not shipped, among them
    for name, new in verbs.GONE.items():
        with pytest.raises(ConfigError, match=re.escape(f"{name}: it is gpt2lab {new}")):
            verbs.main([name, "--help"])
        assert " ".join(new.split()[:2]) in EVERY or new.split()[0] in VERBS
    # The page of verbs is short.
    pages = []
    for argv in ([], ["--help"], ["help"]):
        assert verbs.main(argv) == 0
        pages.append(capsys.readouterr().out)
    assert len(set(pages)) == 1
    lines = pages[0].splitlines()
    assert len(lines) <= 46
    assert max(map(len, lines)) <= 80
    assert set(re.findall(r"^  ([a-z-]+)  ", pages[0], flags=re.M)) == set(VERBS)
    assert (verbs.main(["--version"]), capsys.readouterr().out) == (0, f"gpt2lab {__version__}\n")


@pytest.mark.parametrize("verb", EVERY)
def test_the_help_of_a_verb_has_two_examples_and_fits(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = verb.split()
    short, long = shown(capsys, *words, "--help"), shown(capsys, *words, "--help-all")
    assert short.startswith(f"usage: gpt2lab {verb} ")
    assert len(re.findall(rf"^  .*gpt2lab[ .]{verb}\b.*$", short, flags=re.M)) >= 2
    for text in (short, long):
        assert "None" not in text.replace("instructions` is None", "")
        assert max(map(len, text.splitlines())) <= 80
    assert len(short.splitlines()) <= 62
    flags = [set(re.findall(r"^  --(\w+)", text, flags=re.M)) for text in (short, long)]
    assert flags[0] <= flags[1]
    assert flags[1] or verb in UNION


def test_help_and_a_verb_are_its_help_arguments_first_and_what_a_flag_takes(capsys):
    for verb in ("train", "data show", "runs list"):
        assert shown(capsys, "help", *verb.split()) == shown(capsys, *verb.split(), "--help")
    text = shown(capsys, "ablate", "--help")
    assert re.search(r"\n\nSETTINGS is a file with one setting per line", text)
    assert text.index("\n  SETTINGS ") < text.index("\n  --out ")
    text = shown(capsys, "sample", "--help-all")
    assert "usage: gpt2lab sample TARGET [flags]" in text
    default = r"--device auto\|cpu\|cuda +auto = cuda if there is one \(default auto\)"
    assert re.search(default, text)
    assert re.search(r"--prompt TEXT ", text)
    assert re.search(r"--interactive  ", text)


@pytest.mark.parametrize(
    ("called", "is_installed", "train", "status"),
    [
        ("/venv/bin/gpt2lab", True, "gpt2lab train", "gpt2lab"),
        ("src/train.py", True, "python src/train.py", "gpt2lab"),
        ("src/train.py", False, "python src/train.py", "env PYTHONPATH=src python -m gpt2lab"),
        ("gpt2lab/__main__.py", True, "python -m gpt2lab train", "python -m gpt2lab"),
        ("gpt2lab/__main__.py", False, "python -m gpt2lab train", "python -m gpt2lab"),
        ("ipykernel_launcher", True, "gpt2lab train", "gpt2lab"),
    ],
)
def test_a_verb_has_the_typed_form(monkeypatch, tmp_path, called, is_installed, train, status):
    monkeypatch.chdir(paths.REPOSITORY)
    for name in ("python", "torchrun", *["gpt2lab"] * is_installed):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [called])
    assert " ".join(paths.command_words("train")) == train
    assert " ".join(paths.command_words("status")) == f"{status} status"
    *found, program = paths.command_words("status", anywhere=True)[: 1 if is_installed else 3]
    assert Path(program).parent == tmp_path
    assert found[1:] == [f"PYTHONPATH={paths.REPOSITORY / 'src'}"] * (not is_installed)
    assert " ".join(paths.command_words("train", 2)) == f"{train} --gpus 2"
    with monkeypatch.context() as of_rank:  # of --gpus
        of_rank.setattr(sys, "argv", ["src/train.py"])
        of_rank.setenv(paths.LAUNCHED, called)
        assert " ".join(paths.command_words("train", 2)) == f"{train} --gpus 2"
    if called == "src/train.py":  # as torchrun calls it
        monkeypatch.setenv("RANK", "0")
        many = "torchrun --nproc_per_node=2 src/train.py"
        assert " ".join(paths.command_words("train", 2)) == many


def test_no_message_names_a_verb_that_went():
    """Not the files: where the package is installed, there are none."""
    named, gone = set(), set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        named |= set(re.findall(r"paths\.command_words\([\"']([\w -]+)", text))
        used = re.findall(r"(?<!from )\bgpt2lab ([a-z][a-z-]+)\b", text)
        gone |= {(path.name, verb) for verb in used if verb in verbs.GONE}
        literal = re.search(r"^(?!\s*(?:#|\"\"\")).*\"[^\"]*scripts/\w+\.py", text, re.M)
        assert literal is None, f"{path}: {literal}"
    assert named <= EVERY.keys()
    assert not gone


def test_the_trainer_s_other_verbs_have_their_own_words_for_flags(capsys):
    text = " ".join(shown(capsys, "runs", "list", "--help").split())
    assert text.startswith("usage: gpt2lab runs list [RUN] [flags]")
    assert "--list_checkpoints" not in text
    text = " ".join(shown(capsys, "runs", "import", "--help").split())
    assert text.startswith("usage: gpt2lab runs import FILE [flags]")
    assert "--trust read a file whose settings are pickled objects" in text
    text = " ".join(shown(capsys, "finetune", "--help").split())
    assert "--num_epochs FLOAT passes over the conversations (default 3) " in text
    assert "(default a tenth of the preset's, with adapters a half)" in text
    assert "random weights" not in text


@pytest.mark.parametrize(
    "typed",
    [
        *("sample", "export x", "runs", "runs delete x", "runs repairlog x"),
        *("runs import --run_name=a", "runs tensorboard --port abc", "plot --x=foo"),
        *("sample --devise cpu x", "sample --targets x", "sample x --num_samples=a --dtype=b"),
        *("ladder run --job=2 x", "compare --explian a b", "replay x --qqqq=1 --steps=1"),
        *("trian", "--qqq", "sample nosuch"),
    ],
)
def test_what_is_missing_or_wrong_is_said_in_the_terms_of_the_verb(typed, wording, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # not a terminal
    with pytest.raises(ConfigError, check=wording):
        verbs.main(typed.split())


@pytest.mark.slow
def test_torchrun_starts_the_trainer_as_a_module(tmp_path):
    write_shards(tmp_path / "d", train=(400, 300), val=(150,))
    flags = [*TINY, "--max_steps=2", "--data_dir=d", "--checkpoint_dir=runs", "--run_name=r"]
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    launch.worked(launch.python(*command, "-m", "gpt2lab.train", *flags, folder=tmp_path))
    assert set(launch.steps(tmp_path / "runs" / "r")) == {1, 2}
