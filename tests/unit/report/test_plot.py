"""gpt2lab plot: curves of runs, of an ablation, of a ladder and of comparisons, as pictures."""

import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import numpy as np
import pytest

import launch
from gpt2lab.commands import plot
from gpt2lab.errors import ConfigError, SaveError
from gpt2lab.lab.over_seeds import OverUnits, compare_all
from gpt2lab.report import curves, plots
from gpt2lab.report.page import render
from launch import append, call
from long_logs import BUDGET, long_run_of, peak_bytes


def test_curves_follow_the_line_of_the_newest_weights(run_dir):
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
    # Places by tokens and hours are those of the steps.
    seconds = [step["step_seconds"] for step in steps.values()]
    x = raw.x
    assert x["tokens"].tolist() == [step["tokens"] for step in steps.values()]
    np.testing.assert_allclose(x["hours"] * 3600, np.cumsum(seconds))
    evaluated = found.validation.x  # also before the first step
    assert evaluated["tokens"].tolist() == [0, *(steps[n]["tokens"] for n in (4, 8, 12))]
    np.testing.assert_allclose(evaluated["hours"][[0, -1]] * 3600, [0, sum(seconds)])


def test_many_steps_become_few_points_and_no_spike_is_lost():
    values = (np.arange(40_000) % 7).astype(float)
    values[[12_345, 33_333]] = 1000, -1000
    sharp = curves.extremes(values)
    assert len(sharp) <= 800
    assert {12_345, 33_333} <= set(sharp.tolist())
    even = np.array(curves.spread(range(len(values)), 400))
    assert (len(even), even[0], even[-1]) == (400, 0, 39_999)
    assert set(curves.running_medians(values, even)[1:].tolist()) == {3.0}
    # A running median over many values ends with the last.
    values = np.repeat([1.0, 3.0], 100_000)
    found = curves.running_medians(values, np.array(curves.spread(range(len(values)), 400)))
    assert (found[0], found[-1]) == (1.0, 3.0)


def test_a_long_log_costs_little_memory_and_its_page_is_small(run_dir, tmp_path):
    long_run = long_run_of(run_dir, tmp_path / "long")
    for read in (curves.read_curves, render):
        assert peak_bytes(read, long_run) < BUDGET
    page = render(long_run)
    assert len(page) < 500_000
    paths = re.findall(r' d="([^"]*)"', page)
    assert 500 < max(path.count("L") for path in paths) < 800  # the extremes of 400 stretches


def test_what_is_no_number_is_not_drawn(run_dir):
    append(run_dir, event="eval", step=10, val_loss="high")
    for step, loss in ((13, None), (14, float("inf"))):
        append(run_dir, event="step", step=step, loss=loss, tokens=832)
    found = curves.read_curves(run_dir)
    assert found.validation.x["step"].tolist() == [0, 4, 8, 12]
    assert found.loss.raw.x["step"].tolist() == list(range(1, 13))


def test_a_picture_is_written_for_one_run_and_for_several(run_dir, tmp_path):
    code, said, error = call("plot", "r", "--checkpoint_dir", run_dir.parent)
    assert (code, said.strip()) == (0, str(run_dir / "plot.png")), error
    other = shutil.copytree(run_dir, run_dir.with_name("other"))
    launch.worked(call("plot", run_dir, other, "--out", tmp_path / "both.png"))
    for path in (run_dir / "plot.png", tmp_path / "both.png"):
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert int.from_bytes(content[16:20], "big") > 1000  # pixels wide


def test_svg_pictures_follow_the_colours_of_the_page(run_dir, tmp_path):
    out = tmp_path / "x.svg"
    table = Path(__file__).parents[3] / "docs" / "benchmarks.json"
    for words in ([run_dir, "--only_loss"], ["--speeds", table]):
        launch.worked(call("plot", *words, "--out", out))
        picture = out.read_text()
        assert ("prefers-color-scheme:dark" in picture, "currentColor" in picture) == (True, True)
        assert "#ffffff" not in picture  # no background
        ElementTree.fromstring(picture)


def test_a_picture_that_cannot_be_written_leaves_the_one_before(run_dir, tmp_path, monkeypatch):
    picture = tmp_path / "pictures" / "plot.png"
    picture.parent.mkdir()
    picture.write_bytes(b"the one before")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(SaveError, match="No space left"):
        plots.draw([curves.read_curves(run_dir)], picture, plots.View())
    assert (list(picture.parent.iterdir()), picture.read_bytes()) == ([picture], b"the one before")


def test_hellaswag_is_drawn_beside_the_reference_of_its_own_rule(run_dir, tmp_path):
    from matplotlib.figure import Figure

    scores = {"acc_norm": 0.4, "acc_norm_se": 0.1}
    scores |= {"acc_token_norm": None, "acc_token_norm_se": None}
    append(run_dir, event="hellaswag", step=8, n=10, seconds=1.0, **scores)
    found = curves.read_curves(run_dir)
    axes = Figure().add_subplot()
    plots._draw_panel(axes, curves.panels_of([found])[1], [found], plots.View())
    lines = [line.get_ydata()[0] for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert lines == [0.3114, 0.337]
    panels = [axes.get_ylabel() for axes in plots._figure([found], plots.View()).axes]
    assert "HellaSwag acc_norm ± standard error" in panels
    assert not any("acc_token_norm" in panel for panel in panels)  # nor the lineage's 0.2955
    plots.draw([found], tmp_path / "x.png", plots.View())


def test_a_plot_runs_over_tokens_or_hours_and_on_logarithmic_axes(run_dir):
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


def seed(**losses: float) -> dict[str, Any]:
    """Return one run of an ablation: {tokens: loss} with a t before the number, an hour for 100 tokens."""
    tokens = [int(name[1:]) for name in losses]
    return {"tokens": tokens, "seconds": [36 * t for t in tokens], "losses": [*losses.values()]}


def test_an_ablation_is_drawn_as_mean_and_standard_error(tmp_path):
    from matplotlib.figure import Figure

    mean = plots.mean_over_seeds([seed(t100=4.0, t200=3.0), seed(t100=5.0)])
    assert (mean.x["tokens"].tolist(), mean.x["hours"].tolist()) == ([100], [1])  # of both
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
    launch.worked(call("plot", "--ablation", tmp_path, *words))
    ElementTree.fromstring(out.read_text())


@pytest.mark.parametrize(
    "words",
    [
        *("", "RUN RUN", "RUN --out x.pdf", "RUN --out nowhere/x.png", "EMPTY"),
        *("--speeds none.json", "--speeds none.json --out x.svg"),
        *("no_such_run --checkpoint_dir EMPTY", "--speeds none.json --out x.svg --log x"),
        "--speeds none.json --ladder EMPTY --out x.svg",
        "--speeds none.json --compare b --out x.svg",
        *("--ablation EMPTY", "--ablation EMPTY --x step", "RUN --ablation EMPTY"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_one_line(run_dir, tmp_path, words, wording):
    (tmp_path / "empty").mkdir()
    names = {"RUN": run_dir, "EMPTY": tmp_path / "empty"}
    wording(launch.rejected(call("plot", *(names.get(word, word) for word in words.split()))))


_INTERVAL = {"mean": 1, "low": 0, "high": 2}
_ONE = {"over_units": None, "over_seeds": _INTERVAL, "sequential": None, "setting": "a"}


@pytest.mark.parametrize(
    ("flag", "name", "found"),
    [
        ("--speeds", "file.json", []),
        ("--speeds", "file.json", {"tokens_per_second": {}}),
        ("--ladder", "ladder.json", {}),
        ("--ladder", "ladder.json", {"rungs": [], "curves": 3, "prediction": None, "score": None}),
        ("--ablation", "ablation.json", {"settings": [], "comparisons": [_ONE]}),
        ("--compare", "file.json", {"a": "x", "b": "y", "explain": {}}),
    ],
)
def test_a_file_of_another_shape_is_one_line(flag, name, found, tmp_path, wording):
    (tmp_path / name).write_text(json.dumps(found))
    what = tmp_path if name != "file.json" else tmp_path / name
    with pytest.raises(ConfigError, check=wording):
        plot.main([flag, str(what), "--out", str(tmp_path / "it.png")])
    assert not (tmp_path / "it.png").exists()
