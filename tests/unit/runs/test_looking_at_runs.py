"""status, plot and runs resume-command: read from a run's files, also while it trains or after it died."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import numpy as np
import pytest

import launch
from gpt2lab.checkpoint import catalog
from gpt2lab.commands import plot, resume_command
from gpt2lab.commands.resume_command import plan_continuation, write
from gpt2lab.errors import ConfigError, GPT2LabError
from gpt2lab.lab.over_seeds import OverUnits, compare_all
from gpt2lab.report import curves, plots
from gpt2lab.runs import history, overview
from gpt2lab.runs.folder import RunFolder
from gpt2lab.runs.summary import print_checkpoints
from gpt2lab.runs.target import find_folder
from launch import call
from tiny import parse, pretrain


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """Return the folder of a run that was stopped after 7 of 12 steps and resumed from step 4 to the end."""
    runs = tmp_path_factory.mktemp("runs")
    flags = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--context_length=16", "--vocab_size=256"]
    flags += ["--total_batch_size=64", "--mini_batch_size=2", "--val_tokens=320", "--device=cpu"]
    flags += [f"--data_dir={tiny_data}", f"--checkpoint_dir={runs}", "--run_name=r", "--dtype=fp32"]
    flags += ["--max_steps=12", "--eval_freq=4", "--checkpoint_freq=4", "--compile=off"]
    pretrain(parse([*flags, "--stop_after_steps=7"]))
    pretrain(parse([*flags, "--resume=4"]))
    return runs / "r"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs" / "r"))


def test_a_name_means_the_same_run_to_every_command_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, here = tmp_path / "runs", tmp_path / "here"
    for folder in (runs / "r" / "step_00000002", here / "r", here / "only_here"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, meant in {
        "r": runs / "r",  # not here/r
        "r/step_00000002": runs / "r" / "step_00000002",
        "./r": here / "r",
        "../runs/r": here / ".." / "runs" / "r",
        "~/runs/r": runs / "r",
        "only_here": here / "only_here",
        str(runs / "r"): runs / "r",
    }.items():
        assert history.find_run(name, checkpoint_dir=runs) == meant
        assert find_folder(name, runs) == meant
    assert find_folder("hf:r", runs) is None
    assert find_folder("gpt2", runs) is None
    with pytest.raises(ConfigError, match="no run of this name"):
        history.find_run("gpt2", checkpoint_dir=runs)


# -- status ----------------------------------------------------------------------------------------------------------


def rewrite_status(run_dir: Path, **values: object) -> None:
    path = run_dir / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_status_of_a_complete_run(run_dir: Path) -> None:
    status = overview.read_run(run_dir)
    steps = launch.steps(run_dir)
    assert (status.state, status.exit_code, status.problem) == ("completed", 0, None)
    assert (status.step, status.last_step, status.checkpoint_step) == (12, 12, 12)
    assert status.loss == steps[12]["loss"]
    assert status.heartbeat_seconds is not None
    code, said, _ = call("status", "--checkpoint_dir", run_dir.parent)
    assert code == 0
    assert "completed  12/12" in said


def test_a_run_whose_process_is_gone_is_not_called_running(run_dir: Path) -> None:
    rewrite_status(run_dir, state="running", exit_code=None)
    assert overview.read_run(run_dir).state == "killed"
    held = RunFolder(run_dir)
    assert overview.read_run(run_dir).state == "running"
    held.close()
    assert overview.read_run(run_dir).state == "killed"


def test_who_only_looks_keeps_no_run_from_starting(run_dir: Path) -> None:
    """A table of runs that is shown every few seconds looks whether the lock is held, by taking a share of it."""
    with open(run_dir / "run.lock") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.1, fcntl.flock, (looking, fcntl.LOCK_UN)).start()
        RunFolder(run_dir).close()


def test_the_time_left_of_a_running_run_counts_down(run_dir: Path) -> None:
    rewrite_status(run_dir, state="running")
    last = launch.events(run_dir, "step")[-1]
    last |= {"time": time.time() - 30, "remaining_seconds": 100.0, "step": 12}
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(last) + "\n")
    held = RunFolder(run_dir)
    remaining = overview.read_run(run_dir).remaining_seconds
    held.close()
    assert remaining == pytest.approx(70, abs=3)


def test_a_failed_run_shows_its_exit_code_and_a_damaged_one_its_problem(run_dir: Path) -> None:
    rewrite_status(run_dir, state="failed", exit_code=76)
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write("not json\n")
    said = call("status", "--checkpoint_dir", run_dir.parent)[1]
    assert "failed (76)" in said
    assert "not JSON" in said.splitlines()[-1]


def test_what_this_user_may_not_read_hides_no_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As lost+found, where runs have a disk of their own, and another user's run."""
    runs = run_dir.parent
    shutil.copytree(run_dir, runs / "lost+found")
    (runs / "lost+found" / "metrics.jsonl").unlink()
    real, real_access = os.stat, os.access

    def stat(path: str | Path, **options: Any) -> os.stat_result:
        if "lost+found/" in str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(
        os, "access", lambda path, mode: "lost+found" not in str(path) and real_access(path, mode)
    )
    assert [run.run_name for run in overview.read_runs(runs)] == ["r"]
    assert catalog.newest_run(runs) == run_dir
    assert print_checkpoints(runs, run_name=None, as_json=False) == 0
    monkeypatch.undo()

    def rejected(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(history, "open", rejected, raising=False)
    assert "Permission denied" in str(overview.read_run(run_dir).problem)


def test_status_as_json_of_no_runs_and_of_a_wrong_folder(tmp_path: Path) -> None:
    assert call("status", "--json", "--checkpoint_dir", tmp_path)[1] == '{"runs": []}\n'
    assert "no runs in" in call("status", "--checkpoint_dir", tmp_path)[1]
    for words in (["--checkpoint_dir", "nowhere"], ["--watch", "0"], ["--watch", "1", "--json"]):
        code, said, error = call("status", *words)
        assert (code, said, error.count("\n")) == (2, "", 1)


def test_watch_shows_again_until_it_is_interrupted(run_dir: Path) -> None:
    command = [*launch.words_of("status"), "--watch=0.1"]
    command += [f"--checkpoint_dir={run_dir.parent}"]
    # What a shell starts in the background, as these tests may be, ignores Ctrl+C, and so do its children.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heeds) as process:
        assert process.stdout is not None
        shown = [process.stdout.readline() for _ in range(9)]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(30) == 0
    assert sum("completed" in line for line in shown) >= 2


# -- plot ------------------------------------------------------------------------------------------------------------


def test_curves_follow_the_line_of_the_newest_weights(run_dir: Path) -> None:
    found = curves.read_curves(run_dir)
    assert found.resumes["step"].tolist() == [4]
    assert found.validation.x["step"].tolist() == [0, 4, 8, 12]
    steps = launch.current_steps(run_dir)
    assert launch.steps(run_dir)[6]["attempt"] == 2
    raw = found.loss.raw
    assert raw.x["step"].tolist() == list(steps)
    assert raw.y.tolist() == [step["loss"] for step in steps.values()]
    assert found.grad_norm.raw.y.tolist() == [step["grad_norm"] for step in steps.values()]
    assert found.rates["AdamW"].y.tolist() == [step["lr"] for step in steps.values()]


def test_places_by_tokens_and_hours_are_those_of_the_steps(run_dir: Path) -> None:
    found = curves.read_curves(run_dir)
    steps = launch.current_steps(run_dir)
    seconds = [step["step_seconds"] for step in steps.values()]
    x = found.loss.raw.x
    assert x["tokens"].tolist() == [step["tokens"] for step in steps.values()]
    np.testing.assert_allclose(x["hours"] * 3600, np.cumsum(seconds))
    evaluated = found.validation.x  # also before the first step
    assert evaluated["tokens"].tolist() == [0, *(steps[n]["tokens"] for n in (4, 8, 12))]
    np.testing.assert_allclose(evaluated["hours"][[0, -1]] * 3600, [0, sum(seconds)])


def test_many_steps_become_few_points_and_no_spike_is_lost() -> None:
    values = (np.arange(40_000) % 7).astype(float)
    values[[12_345, 33_333]] = 1000, -1000
    sharp = curves.extremes(values)
    assert len(sharp) <= 800
    assert {12_345, 33_333} <= set(sharp.tolist())
    even = np.array(curves.spread(range(len(values)), 400))
    assert (len(even), even[0], even[-1]) == (400, 0, 39_999)
    assert set(curves.running_medians(values, even)[1:].tolist()) == {3.0}


def test_what_is_no_number_is_not_drawn(run_dir: Path) -> None:
    event = {"event": "eval", "time": 1.0, "attempt": 2, "step": 10, "val_loss": "high"}
    wrong = {"event": "step", "time": 1.0, "attempt": 2, "step": 13, "loss": None, "tokens": 832}
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(event) + "\n" + json.dumps(wrong) + "\n")
        file.write(json.dumps(wrong | {"step": 14, "loss": float("inf")}) + "\n")
    found = curves.read_curves(run_dir)
    assert found.validation.x["step"].tolist() == [0, 4, 8, 12]
    assert found.loss.raw.x["step"].tolist() == list(range(1, 13))


def test_a_picture_is_written_for_one_run_and_for_several(run_dir: Path, tmp_path: Path) -> None:
    code, said, error = call("plot", "r", "--checkpoint_dir", run_dir.parent)
    assert (code, said.strip()) == (0, str(run_dir / "plot.png")), error
    other = shutil.copytree(run_dir, run_dir.with_name("other"))
    code, _, error = call("plot", run_dir, other, "--out", tmp_path / "both.png")
    assert code == 0, error
    for path in (run_dir / "plot.png", tmp_path / "both.png"):
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert int.from_bytes(content[16:20], "big") > 1000  # pixels wide


def test_svg_pictures_follow_the_colours_of_the_page(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.svg"
    table = Path(__file__).parents[3] / "docs" / "benchmarks.json"
    for words in ([run_dir, "--only_loss"], ["--speeds", table]):
        code, _, error = call("plot", *words, "--out", out)
        assert code == 0, error
        picture = out.read_text()
        assert "prefers-color-scheme:dark" in picture
        assert "currentColor" in picture
        assert "#ffffff" not in picture  # no background
        ElementTree.fromstring(picture)


def test_a_picture_that_cannot_be_written_leaves_the_one_before(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = tmp_path / "pictures" / "plot.png"
    picture.parent.mkdir()
    picture.write_bytes(b"the one before")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match="No space left"):
        plots.draw([curves.read_curves(run_dir)], picture, plots.View())
    assert [(path.name, path.read_bytes()) for path in picture.parent.iterdir()] == [
        ("plot.png", b"the one before")
    ]


def test_hellaswag_is_drawn_beside_the_reference_of_its_own_rule(
    run_dir: Path, tmp_path: Path
) -> None:
    from matplotlib.figure import Figure

    event = {"event": "hellaswag", "time": 1.0, "attempt": 2, "step": 8, "n": 10, "seconds": 1.0}
    event |= {
        "acc_norm": 0.4,
        "acc_norm_se": 0.1,
        "acc_token_norm": None,
        "acc_token_norm_se": None,
    }
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(event) + "\n")
    found = curves.read_curves(run_dir)
    axes = Figure().add_subplot()
    plots._draw_panel(axes, curves.panels_of([found])[1], [found], plots.View())
    lines = [line.get_ydata()[0] for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert lines == [0.3114, 0.337]
    panels = [axes.get_ylabel() for axes in plots._figure([found], plots.View()).axes]
    assert "HellaSwag acc_norm ± standard error" in panels
    assert not any(
        "acc_token_norm" in panel for panel in panels
    )  # the lineage's 0.2955 has no place here
    plots.draw([found], tmp_path / "x.png", plots.View())


def test_a_plot_runs_over_tokens_or_hours_and_on_logarithmic_axes(run_dir: Path) -> None:
    found = curves.read_curves(run_dir)
    for x in curves.AXES:
        for log in (None, "x", "y", "xy"):
            figure = plots._figure([found, found], plots.View(x, log))
            assert len(figure.axes) == 4
            for axes in figure.axes:
                assert axes.get_xlabel() == plots.X_LABELS[x]
                assert (axes.get_xscale() == "log") == ("x" in (log or ""))
                assert (axes.get_yscale() == "log") == ("y" in (log or ""))
                last = max(max(line.get_xdata()) for line in axes.get_lines())
                assert last == found.loss.smooth.x[x][-1] <= axes.get_xlim()[1]


# -- plot --ablation -------------------------------------------------------------------------------------------------


def seed(**losses: float) -> dict[str, Any]:
    """Return one run of an ablation: {tokens: loss} with a t before the number, an hour for 100 tokens."""
    tokens = [int(name[1:]) for name in losses]
    return {"tokens": tokens, "seconds": [36 * t for t in tokens], "losses": [*losses.values()]}


def test_an_ablation_is_drawn_as_mean_and_standard_error(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    both = [plots._evaluations(seed(t100=4.0, t200=3.0)), plots._evaluations(seed(t100=5.0))]
    mean = plots.mean_over_seeds(both)
    assert (mean.x["tokens"].tolist(), mean.x["hours"].tolist()) == ([100], [1])  # of both
    assert mean.error is not None
    assert (mean.y.tolist(), mean.error.tolist()) == ([4.5], [0.5])  # (5 - 4) / sqrt(2) / sqrt(2)
    plots._draw_measured(Figure().add_subplot(), mean, "hours")
    settings = [
        {"setting": "gpt2", "curves": [seed(t100=4.0, t200=3.0), seed(t100=4.2, t200=3.1)]},
        {"setting": "wide", "curves": [seed(t100=3.9, t200=2.8)]},
    ]
    (tmp_path / "ablation.json").write_text(json.dumps({"settings": settings}))
    code, said, error = call("plot", "--ablation", tmp_path)
    assert (code, said.strip()) == (0, str(tmp_path / "ablation.png")), error
    # Beside the curves, the differences: as an ablation writes them.
    differences = {"wide": [-0.1, -0.3, -0.2, -0.2], "alone": [0.1]}
    units = {"wide": OverUnits("document", 9, 7.5, True, -0.2, -0.35, -0.05)}
    found = [asdict(one) for one in compare_all("gpt2", differences, units, until_decided=True)]
    panel = Figure().add_subplot()
    plots._draw_differences(panel, {c["setting"]: plots._intervals(c) for c in found}, "- gpt2")
    bars = {bar.get_label(): bar[2][0].get_segments() for bar in panel.containers}
    assert list(bars) == ["confidence sequence", "over documents (95 %)"]
    assert {kind: len(segments) for kind, segments in bars.items()} == dict.fromkeys(bars, 1)
    assert bars["over documents (95 %)"][0][:, 0] == pytest.approx([-0.35, -0.05])
    assert [label.get_text() for label in panel.get_yticklabels()] == ["wide", "alone"]
    content = json.dumps({"settings": settings, "comparisons": found})
    (tmp_path / "ablation.json").write_text(content)
    out = tmp_path / "hours.svg"
    words = ["--x", "hours", "--log", "xy", "--out", out]
    code, _, error = call("plot", "--ablation", tmp_path, *words)
    assert code == 0, error
    ElementTree.fromstring(out.read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "which run"),
        (["no_such_run"], "no run of this name"),
        (["RUN", "RUN"], "several runs: say where"),
        (["RUN", "--out", "x.pdf"], "end in .png or .svg"),
        (["RUN", "--out", "nowhere/x.png"], "cannot be written"),
        (["EMPTY"], "has taken no step"),
        (["--speeds", "none.json"], "say where to write with --out"),
        (["--speeds", "none.json", "--out", "x.svg"], "no table of speeds"),
        (["--speeds", "none.json", "--out", "x.svg", "--log", "x"], "leave out --log"),
        (["--speeds", "none.json", "--ladder", "EMPTY", "--out", "x.svg"], "leave out --speeds"),
        (["--speeds", "none.json", "--compare", "b", "--out", "x.svg"], "leave out --speeds"),
        (["--ablation", "EMPTY"], "no table of an ablation"),
        (["--ablation", "EMPTY", "--x", "step"], "--x tokens or hours"),
        (["RUN", "--ablation", "EMPTY"], "leave out runs"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_one_line(
    run_dir: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    names = {"RUN": run_dir, "EMPTY": tmp_path / "empty"}
    code, said, error = call("plot", *(names.get(word, word) for word in words))
    assert (code, said) == (2, "")
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


# -- resume_command --------------------------------------------------------------------------------------------------


_INTERVAL = {"mean": 1, "low": 0, "high": 2}


@pytest.mark.parametrize(
    ("flag", "name", "found", "line"),
    [
        ("--speeds", "file.json", [], "no table of speeds (another shape); docs/"),
        ("--speeds", "file.json", {"tokens_per_second": {}}, "no table of speeds (another shape)"),
        ("--ladder", "ladder.json", {}, "no results of a ladder (it lacks 'rungs'); gpt2lab "),
        (
            *("--ladder", "ladder.json"),
            {"rungs": [], "curves": 3, "prediction": None, "score": None},
            "no results of a ladder (another shape); ",
        ),
        (
            *("--ablation", "ablation.json"),
            {
                "settings": [],
                "comparisons": [
                    {
                        "over_units": None,
                        "over_seeds": _INTERVAL,
                        "sequential": None,
                        "setting": "a",
                    }
                ],
            },
            "no table of an ablation (another shape); ",
        ),
        ("--compare", "file.json", {"a": "x", "b": "y", "explain": {}}, "no comparison with"),
    ],
)
def test_a_file_of_another_shape_is_one_line(
    flag: str, name: str, found: Any, line: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(json.dumps(found))
    what = tmp_path if name != "file.json" else tmp_path / name
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / name}: {line}")):
        plot.main([flag, str(what), "--out", str(tmp_path / "it.png")])
    assert not (tmp_path / "it.png").exists()


def test_the_printed_command_continues_the_run(run_dir: Path) -> None:
    more = ["--max_steps", "14", "--allow_change", "max_steps"]
    by_name = ["r", "--checkpoint_dir", run_dir.parent]
    code, command, notes = call("runs resume-command", *by_name, *more)
    assert (code, notes) == (0, "changed: max_steps 12 -> 14\n")
    python, program, *argv = shlex.split(command)
    assert Path(shutil.which(python) or "").absolute() == Path(sys.executable)
    done = call(program, *argv)
    assert done.returncode == 0, done.stderr
    assert max(launch.steps(run_dir)) == 14


def test_jobs_of_kubernetes_and_skypilot_are_files_to_fill_in(run_dir: Path) -> None:
    for output, file in (("k8s", "kubernetes"), ("sky", "skypilot")):
        with pytest.raises(ConfigError, match=f"here it is examples/{file}.yaml"):
            resume_command.main([str(run_dir), f"--output={output}"])


def test_a_checkpoint_s_folder_names_its_step_and_the_world_is_a_choice(run_dir: Path) -> None:
    found = plan_continuation(str(run_dir / "step_00000008"), num_gpus=2, argv=[])
    assert found.start.checkpoint is not None
    assert (found.start.checkpoint.step, found.start.plan.max_steps, found.job.processes) == (
        8,
        12,
        2,
    )
    command = write(found, output="command")
    assert "torchrun --standalone --nproc_per_node=2" in command
    assert "--resume 8 --run_name r" in command
    with pytest.raises(ConfigError, match=r"go back to checkpoint 8 .* the job of r$"):
        write(found, output="slurm")  # it is started again: each time from the same step
    found = plan_continuation(str(run_dir), num_gpus=2, argv=[])
    for output in ("script", "slurm"):
        text = write(found, output=output)
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
        assert shlex.join(found.job.words) in text
    assert "--gpus" not in text, "the run was trained on a CPU"
    on_gpus = plan_continuation(str(run_dir), num_gpus=None, argv=[], nodes=2, gpus=1)
    text = write(on_gpus, output="slurm")
    for part in ("#SBATCH --nodes=2", "#SBATCH --gpus-per-node=1", "--rdzv_backend=c10d"):
        assert part in text


@pytest.mark.slow
def test_a_script_goes_on_in_the_folder_where_it_was_made(
    run_dir: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "my place"
    here.mkdir()
    (here / "data").symlink_to(tiny_data)
    python = here / "my env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "executable", str(python))
    argv = ["--data_dir", "data", "--max_steps", "13", "--allow_change", "max_steps"]
    text = write(plan_continuation(str(run_dir), num_gpus=None, argv=argv), output="script")
    done = subprocess.run(
        ["bash", "-c", text], cwd="/", capture_output=True, text=True, timeout=launch.HANG_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert max(launch.steps(run_dir)) == 13


@pytest.mark.parametrize(
    ("argv", "num_gpus", "message"),
    [
        (["--max_lr", "1e-3"], 1, "would change its mathematics: max_lr 0.0006 -> 0.001"),
        (["--n_layer", "3"], 1, "another architecture"),
        ([], 3, "total_batch_size"),
        (["--no_such_flag", "1"], 1, "unknown flag"),
    ],
)
def test_what_the_trainer_would_reject_is_rejected_now(
    run_dir: Path, argv: list[str], num_gpus: int, message: str
) -> None:
    before = sorted(os.listdir(run_dir))
    with pytest.raises(GPT2LabError, match=message):
        plan_continuation(str(run_dir), num_gpus=num_gpus, argv=argv)
    assert sorted(os.listdir(run_dir)) == before


def test_a_run_without_a_checkpoint_cannot_be_continued(tmp_path: Path) -> None:
    with pytest.raises(GPT2LabError, match="no valid checkpoint"):
        plan_continuation(str(tmp_path), num_gpus=None, argv=[])
    with pytest.raises(ConfigError, match="no run of this name"):
        plan_continuation("nowhere", num_gpus=None, argv=[])
