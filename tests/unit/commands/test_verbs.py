"""`gpt2lab VERB`: the same functions as the programs, in an instant, with help that fits a screen."""

from __future__ import annotations

import importlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from gpt2lab import __version__, paths
from gpt2lab.commands import help_page, verbs
from gpt2lab.commands.verbs import VERBS
from gpt2lab.config.flags import flags_of
from gpt2lab.errors import ConfigError
from launch import REPOSITORY, SCRIPTS
from tiny import CONTEXT, write_shards

SOURCE = REPOSITORY / "src"
UNION = {
    "data",
    "ladder",
    "runs",
    "tokenizer",
    "benchmark",
}  # each a family of verbs, with examples of its own


def run(*argv: str, folder: Path, module: str = "gpt2lab") -> subprocess.CompletedProcess[str]:
    """Run a verb as its own program in a folder, and list what was imported on stderr."""
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=launch.HANG_SECONDS,
    )


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return what a verb prints in this process, as its help does."""
    with pytest.raises(SystemExit) as end:
        verbs.main(list(argv))
    assert end.value.code == 0
    return capsys.readouterr().out


def test_every_script_runs_the_verb_that_messages_call_it_by() -> None:
    for path in SCRIPTS.glob("[a-z]*.py"):
        (verb,) = re.findall(r'run\("(\S+)"\)', path.read_text())
        assert verb in VERBS
        assert paths.script(verb) == f"scripts/{path.name}"


def test_the_page_of_verbs_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for argv in ([], ["--help"]):
        assert verbs.main(argv) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]
    lines = pages[0].splitlines()
    assert len(lines) <= 42
    assert max(map(len, lines)) <= 80
    assert set(re.findall(r"^  ([a-z-]+)  ", pages[0], flags=re.M)) == set(VERBS)
    assert verbs.main(["--version"]) == 0
    assert capsys.readouterr().out == f"gpt2lab {__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_has_two_examples_and_fits(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, long = shown(capsys, verb, "--help"), shown(capsys, verb, "--help-all")
    assert short.startswith(f"usage: gpt2lab {verb} ")
    examples = re.findall(rf"^  .*gpt2lab[ .]{verb}\b.*$", short, flags=re.M)
    assert len(examples) >= 2
    for text in (short, long):
        assert "None" not in text.replace("instructions` is None", "")
        assert max(map(len, text.splitlines())) <= 80
    assert len(short.splitlines()) <= 62
    flags = [set(re.findall(r"^  --(\w+)", text, flags=re.M)) for text in (short, long)]
    assert flags[0] <= flags[1]
    assert flags[1] or verb in UNION


def test_the_help_of_a_verb_within_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "data", "show", "--help")
    assert text.startswith("usage: gpt2lab data show [flags]\n")
    assert "  gpt2lab data show --run RUN --step 100 --text\n" in text
    assert set(re.findall(r"^  --(\w+)", text, flags=re.M)) == {"data_dir", "run", "step", "text"}
    assert shown(capsys, "benchmark", "parallel", "--help").startswith(
        "usage: gpt2lab benchmark par"
    )


def test_arguments_come_before_flags(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "ablate", "--help")
    assert re.search(r"\n\nSETTINGS is a file with one setting a line", text)
    assert text.index("\n  SETTINGS ") < text.index("\n  --out ")


def test_help_shows_what_a_flag_takes() -> None:
    module = importlib.import_module("gpt2lab.commands.sample")
    flags = list(flags_of(module.Sample))
    text = help_page.page("gpt2lab sample", flags, module.__doc__ or "", everything=True)
    assert "usage: gpt2lab sample TARGET [flags]" in text
    assert re.search(
        r"--device auto\|cpu\|cuda +auto = cuda if there is one \(default auto\)", text
    )
    assert re.search(r"--prompt TEXT ", text)
    assert re.search(r"--interactive  ", text)


def test_a_message_names_programs_as_they_are_called_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.command("prepare") == "python scripts/prepare_data.py"
    assert paths.script("train") == "src/train.py"
    monkeypatch.setattr(paths, "IS_CHECKOUT", False)
    assert paths.command("prepare") == paths.script("prepare") == "gpt2lab prepare"
    assert paths.command_words("train")[1:] == ["train"]


def test_every_verb_that_a_message_names_is_there_with_its_file() -> None:
    named = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        named |= set(re.findall(r"paths\.(?:script|command|command_words)\([\"']([\w-]+)", text))
        # A name that is not asked for would be wrong where the package is installed.
        literal = re.search(r"^(?!\s*(?:#|\"\"\")).*\"[^\"]*(?:scripts|src)/\w+\.py", text, re.M)
        assert literal is None or path.name == "paths.py", f"{path}: {literal}"
    assert named <= verbs.VERBS.keys()
    assert len(named) > 10
    for verb in named:
        file, *flags = paths.script(verb).split()  # a verb without a file is a flag of the trainer
        assert (paths.REPOSITORY / file).is_file(), verb
        assert flags in ([], [f"--{verb}_checkpoint"])


def test_an_unknown_verb_gets_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown verb 'trian': did you mean train\?"):
        verbs.main(["trian"])
    with pytest.raises(ConfigError, match="unknown verb '--qqq': gpt2lab --help lists them"):
        verbs.main(["--qqq"])


def test_the_trainer_s_other_verbs_have_their_own_words_for_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = " ".join(shown(capsys, "list", "--help").split())
    assert text.startswith("usage: gpt2lab list [RUN] [flags]")
    assert "--verify read every byte and compare its hash; exit code 1 if one is damaged" in text
    assert "--run_name TEXT this run alone; default all" in text
    assert "--list_checkpoints" not in text
    text = " ".join(shown(capsys, "import", "--help").split())
    assert text.startswith("usage: gpt2lab import FILE [flags]")
    assert "--trust read a file whose settings are pickled objects" in text
    text = " ".join(shown(capsys, "finetune", "--help").split())
    assert "--num_epochs FLOAT passes over the conversations; default 3 " in text
    assert "default a tenth of the preset's, with adapters a half of the preset's" in text
    assert "random weights" not in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["sample"], "TARGET is missing: a run (name or folder), a checkpoint's folder"),
        (
            ["export", "x"],
            "--out is missing: folder to write, or file.gguf; must not exist; see gpt2lab",
        ),
        (["runs"], "give a verb: rm, archive or sync"),
        (["runs", "delete", "x"], "unknown verb 'delete': rm, archive or sync"),
        (["import"], "give the file: python src/train.py --import_checkpoint ckpt.pt --run_name "),
        (["import", "--run_name=a"], "give the file: "),
        (["tensorboard", "--port", "abc"], "--port abc: not a whole number like 5000, 100M or "),
        (["plot", "--x=foo"], "--x foo: give one of step, tokens, hours"),
        (["sample", "--devise", "cpu", "x"], "unknown flag --devise: did you mean --device?"),
        (["sample", "--targets", "x"], "unknown flag --targets: see --help"),
        (["ladder", "run", "--job=2", "x"], "unknown flag --job: did you mean --jobs?"),
        (["compare", "--explian", "a", "b"], "unknown flag --explian: did you mean --explain?"),
        (["replay", "x", "--qqqq=1", "--steps=1"], "unknown flag --qqqq: see --help"),
        (
            ["sample", "x", "--num_samples=a", "--dtype=b"],
            "--num_samples a: not a whole number like",
        ),
        (
            ["sample", "nosuch"],
            "nothing to continue: give --prompt TEXT, --interactive or --batch FILE",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_said_in_the_terms_of_the_verb(
    argv: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # not a terminal
    with pytest.raises(ConfigError) as error:
        verbs.main(argv)
    assert str(error.value).startswith(says)


@pytest.mark.parametrize(
    "argv",
    [
        *(["--help"], ["train", "--help"], ["status"], ["list"], ["trian"], ["sample", "--qqq"]),
        *(["serve", "--help"], ["env", "--help"], ["env"], ["serve", "x", "--port=-1"]),
        *(["train", "--max_lr=nan"], ["train", "--data_dir=nosuch"], ["preflight", "--n_layr=1"]),
        *(["evaluate", "--batch_size=0", "x"], ["sample", "nosuch run", "--prompt=a"]),
    ],
)
def test_what_answers_or_rejects_at_once_never_imports_torch(
    argv: list[str], tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    has_runs = argv[0] in ("status", "list")
    done = run(*argv, *(["--checkpoint_dir=runs"] if has_runs else []), folder=tmp_path)
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "gpt2lab.commands.verbs" in imported
    assert not {name for name in imported if name.split(".")[0] == "torch"}
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    answers = "--help" in argv or has_runs or argv == ["env"]
    assert (done.returncode, len(said)) == ((0, 0) if answers else (2, 1)), said


def test_torchrun_starts_the_trainer_as_a_module(tmp_path: Path) -> None:
    write_shards(tmp_path / "d", train=(400, 300), val=(150,))
    flags = [
        *(
            "--n_layer=1",
            "--n_head=1",
            "--n_embd=8",
            f"--context_length={CONTEXT}",
            "--max_steps=2",
        ),
        *("--vocab_size=256", "--total_batch_size=64", "--mini_batch_size=2", "--data_dir=d"),
        *("--checkpoint_dir=runs", "--run_name=r", "--device=cpu", "--dtype=fp32"),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, "-m", "gpt2lab.train", *flags],
        cwd=tmp_path,
        env=launch.environment(PYTHONPATH=str(SOURCE)),
        capture_output=True,
        text=True,
        timeout=launch.HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert set(launch.steps(tmp_path / "runs" / "r")) == {1, 2}
