"""scripts/report.py: what the page says, and that nothing a model writes can act in it, seen by a real browser."""

from __future__ import annotations

import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import launch
from gpt2lab.config.command_line import parse
from gpt2lab.runs.report import render
from gpt2lab.training.pretrain import pretrain
from launch import call

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here; apt-get install chromium"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """Return a run of 4 steps that was stopped after 3, resumed from 2 with another rate, and wrote samples."""
    runs = tmp_path_factory.mktemp("runs")
    flags = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--context_length=16", "--device=cpu"]
    flags += ["--total_batch_size=64", "--mini_batch_size=2", "--val_tokens=320", "--compile=off"]
    flags += [f"--data_dir={tiny_data}", f"--checkpoint_dir={runs}", "--run_name=r", "--dtype=fp32"]
    flags += ["--max_steps=4", "--eval_freq=2", "--sample_freq=2", "--sample_tokens=2"]
    pretrain(parse([*flags, "--checkpoint_freq=2", "--stop_after_steps=3"]))
    pretrain(parse([*flags, "--resume=2", "--max_lr=1e-4", "--allow_change=max_lr"]))
    return runs / "r"


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs" / "r"))


def append(run_dir: Path, **event: object) -> None:
    line = {"event": "warning", "time": 1.0, "attempt": 2, "step": 4} | event
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def text_of(page: str) -> str:
    """Return what a reader sees: no tags, spaces joined."""
    body = page[page.index("<body>") :]
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", body)))


# -- what it says ----------------------------------------------------------------------------------------------------


def test_the_page_tells_the_run_s_own_numbers(run_dir: Path) -> None:
    append(run_dir, message="the wall is on fire")
    code, said, error = call("report.py", "r", "--checkpoint_dir", run_dir.parent)
    assert (code, said.strip()) == (0, str(run_dir / "report.html")), error
    page = (run_dir / "report.html").read_text()
    text = text_of(page)
    steps = launch.current_steps(run_dir)
    evals = {event["step"]: event for event in launch.events(run_dir, "eval")}
    assert f"training loss {steps[4]['loss']:.4f} {steps[1]['loss']:.4f} at step 1" in text
    assert f"validation loss {evals[4]['val_loss']:.4f} ± {evals[4]['val_loss_se']:.4f}" in text
    assert "r completed" in text
    assert re.search(r"1 20\S+ \S+ 0 → 3 1 fresh - stop_after_steps", text)
    assert re.search(
        r"2 20\S+ \S+ 2 → 4 1 changed max_lr 0.0006 → 0.0001 ?min_lr 6e-05 → 1e-05 completed", text
    )
    assert re.search(r"max_lr 0\.0001 0\.0006", text)  # among the settings: the preset's
    for event in launch.events(run_dir, "sample"):
        assert event["text"] in html.unescape(page)
    assert "step 2 " in text.partition("Samples")[2]
    assert "the wall is on fire" in text
    assert "Warnings (3)" in text  # and at each start the one about foreign shards
    manifest = json.loads((run_dir / "step_00000004" / "manifest.json").read_text())
    assert manifest["environment"]["torch"] in text
    assert manifest["data_fingerprint"] in text
    estimate = json.loads((run_dir / "estimate.json").read_text())
    verdict = "inside" if estimate["actual"]["inside_interval"] else "outside"
    assert re.search(rf"time \S+ .*? {verdict} tokens/s", text)
    rows = re.findall(r"<td class=\"number\">(\d+)</td><td>((?:rolling|final)[^<]*)</td>", page)
    assert [step for step, _ in rows] == ["2", "4"]
    assert "best" in rows[1][1]


def test_the_page_needs_nothing_from_elsewhere(run_dir: Path) -> None:
    page = render(run_dir)
    links = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
    assert len(links) > 5
    assert all(link.startswith(("#", "data:image/svg+xml;base64,")) for link in links)
    assert "<script" not in page
    assert "default-src 'none'" in page


def test_a_run_that_took_no_step_or_goes_on_is_reported_as_such(run_dir: Path) -> None:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    document = json.loads((run_dir / "estimate.json").read_text()) | {"actual": None}
    (run_dir / "estimate.json").write_text(json.dumps(document))
    (run_dir / "metrics.jsonl").write_text("".join(lines[:-1]))  # without `done`
    assert re.search(r"time \S+ .*? so far tokens/s", text_of(render(run_dir)))
    begin = next(i for i, line in enumerate(lines) if '"begin"' in line)
    (run_dir / "metrics.jsonl").write_text("".join(lines[: begin + 1]))
    assert "No step was taken." in render(run_dir)
    (run_dir / "metrics.jsonl").unlink()
    assert "No step was taken." in render(run_dir)


def test_many_samples_are_spread_over_the_run(run_dir: Path) -> None:
    for step in range(5, 105):
        append(run_dir, event="sample", step=step, text=f"text {step}", seconds=0.1)
    text = text_of(render(run_dir))
    assert "16 of 102, spread over the run" in text
    assert "text 104" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no_such_run"], "no run of this name"),
        (["RUN", "--out", "x.pdf"], "let the name end in .html"),
        (["RUN", "--out", "nowhere/x.html"], "cannot be written"),
        (["EMPTY"], "is this the folder of a run"),
        (["DAMAGED"], "not JSON"),
    ],
)
def test_a_report_that_cannot_be_written_is_one_line(
    run_dir: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    damaged = Path(shutil.copytree(run_dir, tmp_path / "damaged"))
    (damaged / "metrics.jsonl").write_text("no\n")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    names = {"RUN": run_dir, "EMPTY": tmp_path / "empty", "DAMAGED": damaged}
    code, said, error = call("report.py", *(names.get(word, word) for word in words))
    assert (code, said) == (2, "")
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


# -- in a real browser -----------------------------------------------------------------------------------------------

ACTS = "document.title = 'IT RAN'"


class Listener(http.server.BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def listener() -> Iterator[http.server.ThreadingHTTPServer]:
    """Serve on a free port of this machine and note in `asked` what is fetched."""
    Listener.asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def hostile(port: int) -> str:
    """Return a text that takes every way to act: script, handler, style, picture, the end of its own element."""
    return (
        f'</pre></div><script>{ACTS}</script><img src=x onerror="{ACTS}"><svg onload="{ACTS}">'
        f"</style><style>body {{ display: none }}</style><img src='http://127.0.0.1:{port}/spy'>"
        f"{{{{ 7 * 7 }}}} {{% if %}} \"onload='{ACTS}' <!-- &lt; \ud800 \u202e \0"
    )


def browse(page: Path, *flags: str) -> str:
    """Open a page and return the document as it is after its scripts have run."""
    assert CHROMIUM is not None
    profile = page.parent / f"{page.stem}.profile"
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
    ]
    command += ["--virtual-time-budget=2000", *flags, page.resolve().as_uri()]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=launch.HANG_SECONDS)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@needs_browser
def test_hostile_text_is_shown_and_does_nothing(
    run_dir: Path, tmp_path: Path, listener: http.server.ThreadingHTTPServer
) -> None:
    text = hostile(listener.server_port)
    append(run_dir, event="sample", text=text, seconds=0.1)
    append(run_dir, message=text)
    config = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps(config | {"sample_prompt": text}))
    page = tmp_path / "page.html"
    code, _, error = call("report.py", run_dir, "--out", page)
    assert code == 0, error
    document = browse(page, "--dump-dom")
    assert "<title>r</title>" in document
    assert not re.findall(r"<(?:script|svg|img src=\"(?!data:))", document)
    assert document.count("<style>") == 1
    shown = text_of(document)
    assert shown.count("<script>document.title") >= 3  # as text: sample, warning, setting
    assert "{{ 7 * 7 }} {% if %}" in shown
    assert Listener.asked == []

    # The same text where nothing holds it does act, in this browser: the test can fail.
    unguarded = tmp_path / "unguarded.html"
    unguarded.write_bytes(f"<title>r</title><div><pre>{text}".encode("utf-8", "replace"))
    assert "IT RAN" in browse(unguarded, "--dump-dom")
    assert Listener.asked == ["/spy"]

    # And were it not escaped, the page's own policy would still hold it.
    Listener.asked.clear()
    escaped = html.escape(text[:30], quote=False)
    content = page.read_text()
    at = content.index(escaped, content.index('id="samples"'))
    raw = text.encode("utf-8", "replace").decode()
    unescaped = tmp_path / "unescaped.html"
    unescaped.write_text(content[:at] + raw + content[at:])
    document = browse(unescaped, "--dump-dom")
    assert f"<script>{ACTS}</script>" in document  # it is there as an element
    assert "<title>r</title>" in document
    assert Listener.asked == []


@needs_browser
def test_the_page_is_drawn_with_its_style_and_its_curves(run_dir: Path, tmp_path: Path) -> None:
    from matplotlib.image import imread

    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(render(run_dir))
    browse(page, f"--screenshot={picture}", "--window-size=1280,1000", "--hide-scrollbars")
    pixels = (imread(picture)[:, :, :3] * 255).round().astype(int)
    assert pixels.shape == (1000, 1280, 3)

    def count(*colour: int) -> int:
        return int((abs(pixels - colour).max(axis=2) <= 2).sum())

    assert count(0xDF, 0xF3, 0xEA) > 300  # the badge of a completed run: the style sheet applies
    assert count(0x00, 0x72, 0xB2) > 1000  # curves
