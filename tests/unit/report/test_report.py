"""gpt2lab report: what the page says, and that nothing a model writes can act in it, seen by a real browser."""

import html
import http.server
import json
import re
import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import launch
from browser import CHROMIUM, needs_browser
from gpt2lab.report import curves
from gpt2lab.report.charts import Scale
from gpt2lab.report.page import render
from gpt2lab.runs.history import warn_once
from gpt2lab.runs.summary import describe_run
from launch import append, call
from tiny import TEXT, edit_json, parse, pretrain


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_data) -> Path:
    """Return a run of 4 steps that was stopped after 3, resumed from 2 with another rate, and wrote samples."""
    runs = tmp_path_factory.mktemp("runs")
    flags = [*TEXT, f"--data_dir={tiny_data}", f"--checkpoint_dir={runs}", "--run_name=r"]
    flags += ["--max_steps=4", "--eval_freq=2", "--sample_freq=2", "--sample_tokens=2"]
    pretrain(parse([*flags, "--checkpoint_freq=2", "--stop_after_steps=3"]))
    pretrain(parse([*flags, "--resume=2", "--max_lr=1e-4", "--allow_change=max_lr"]))
    return runs / "r"


@pytest.fixture
def run_dir(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "runs" / "r"))


def text_of(page: str) -> str:
    """Return what a reader sees: no tags, spaces joined."""
    body = page[page.index("<body>") :]
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", body)))


def test_the_page_tells_the_run_s_own_numbers(run_dir):
    append(run_dir, message="the wall is on fire")
    code, said, error = call("report", "r", "--checkpoint_dir", run_dir.parent)
    assert (code, said.strip()) == (0, str(run_dir / "report.html")), error
    page = (run_dir / "report.html").read_text()
    text = text_of(page)
    steps = launch.current_steps(run_dir)
    evals = {event["step"]: event for event in launch.events(run_dir, "eval")}
    assert f"training loss {steps[4]['loss']:.4f} {steps[1]['loss']:.4f} at step 1" in text
    assert f"validation loss {evals[4]['val_loss']:.4f} ± {evals[4]['val_loss_se']:.4f}" in text
    assert "r completed" in text
    assert re.search(r"1 20\S+ \S+ 0 → 3 1 fresh - stop_after_steps", text)
    row = r"2 20\S+ \S+ 2 → 4 1 changed max_lr 0.0006 → 0.0001 ?min_lr 6e-05 → 1e-05 completed"
    assert re.search(row, text)
    assert re.search(r"max_lr 0\.0001 0\.0006", text)  # among the settings: the preset's
    for event in launch.events(run_dir, "sample"):
        assert event["text"] in html.unescape(re.sub(r"</?span[^>]*>", "", page))
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


def test_the_page_needs_nothing_from_elsewhere_and_no_locale_with_utf_8(run_dir):
    page = render(run_dir)
    ascii = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    launch.worked(launch.script("report", run_dir, **ascii))
    written = (run_dir / "report.html").read_text("utf-8")
    assert re.findall("[^\x00-\x7f]", written) == re.findall("[^\x00-\x7f]", page)
    links = re.findall(r"(?:src|href)=\"([^\"]*)\"", page)
    assert len(links) > 5
    assert all(link.startswith("#") for link in links)
    assert re.findall(r"<script[^>]*>", page) == ["<script>"]
    assert ("default-src 'none'; style-src 'sha256-" in page, "unsafe" in page) == (True, False)


def hovers(page: str) -> list[dict[str, Any]]:
    """Return what the page's charts show at the pointer."""
    found = re.findall(r' data-hover="([^"]*)"', page)
    return [json.loads(html.unescape(text)) for text in found]


def test_the_charts_show_the_run_s_own_values_by_step_tokens_and_hours(run_dir):
    steps = launch.current_steps(run_dir)
    page = render(run_dir)
    titles = re.findall(r"<figcaption>([^<]*)<", page)
    assert titles == ["loss, nats/token", "learning rate", "gradient norm", "tokens/s"]
    shown = hovers(page)
    assert [chart["axis"] for chart in shown] == ["step", "tokens", "hours"] * 4
    training, validation = shown[0]["series"]
    assert training["x"] == list(steps)
    assert training["y"][0] == pytest.approx(steps[1]["loss"], rel=1e-4)
    evals = {event["step"]: event for event in launch.events(run_dir, "eval")}
    assert validation["x"] == [0, 2, 4]
    assert validation["y"][-1] == pytest.approx(evals[4]["val_loss"], rel=1e-4)
    assert validation["error"][-1] == pytest.approx(evals[4]["val_loss_se"], rel=0.05)
    assert shown[1]["series"][0]["x"] == [step["tokens"] for step in steps.values()]
    spent = sum(step["step_seconds"] for step in steps.values()) / 3600
    assert shown[2]["series"][0]["x"][-1] == pytest.approx(spent)
    assert shown[2]["high"] == pytest.approx(spent)
    for number, field in ((3, "lr"), (6, "grad_norm"), (9, "tokens_per_second")):
        [series] = shown[number]["series"]
        assert series["y"][0] == pytest.approx(steps[1][field], rel=1e-3)
    resumed = re.findall(r'<path class="c0 dotted" d="M(\d+),0V1000">', page)
    assert resumed[0] == "2000"  # step 2 of 4, of a width of 4000


def test_hellaswag_is_drawn_over_time_beside_its_references(run_dir):
    assert "HellaSwag" not in render(run_dir)
    for step, score in ((2, 0.26), (4, 0.28)):
        scores = {"acc_norm": score, "acc_norm_se": 0.004, "acc_token_norm": None, "n": 10_042}
        append(run_dir, event="hellaswag", step=step, **scores, seconds=1.0)
    page = render(run_dir)
    assert ("HellaSwag acc_norm" in page, "HellaSwag acc_token_norm" in page) == (True, False)
    [scores] = hovers(page)[3]["series"]
    assert (scores["x"], scores["y"], scores["error"]) == ([2, 4], [0.26, 0.28], [0.004, 0.004])
    assert page.count("GPT-2 124M</text>") == 3  # one for each axis


def test_the_prompt_is_told_from_what_the_model_wrote(run_dir):
    edit_json(run_dir / "config.json", sample_prompt="<b>new")
    events = launch.all_events(run_dir)
    for event in events:
        if event["event"] == "resume":
            event["changes"]["sample_prompt"] = ["old", "<b>new"]
        if event["event"] == "sample":
            event["text"] = ("old" if event["attempt"] == 1 else "<b>new") + " and the rest"
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    append(run_dir, event="sample", step=5, text="something else", seconds=0.1)
    page = render(run_dir)
    parts = re.findall(r"<pre>(?:<span class=\"prompt\"[^>]*>(.*?)</span>)?(.*?)</pre>", page)
    rest = " and the rest"
    assert parts[:3] == [("old", rest), ("&lt;b&gt;new", rest), ("", "something else")]


def test_several_runs_share_a_page(run_dir, tmp_path):
    other = Path(shutil.copytree(run_dir, tmp_path / "elsewhere" / "r"))
    chosen = [*json.loads((other / "config.json").read_text())["chosen"], "weight_decay"]
    edit_json(other / "config.json", seed=7, weight_decay=0.5, chosen=chosen)
    begun = Path(shutil.copytree(run_dir, tmp_path / "begun"))
    lines = (begun / "metrics.jsonl").read_text().splitlines(keepends=True)
    (begun / "metrics.jsonl").write_text(lines[0])
    out = tmp_path / "all.html"
    code, said, error = call("report", run_dir, begun, other, "--out", out)
    assert (code, said.strip()) == (0, str(out)), error
    page = out.read_text()
    text = text_of(page)
    assert "3 runs" in text
    names = [str(folder) for folder in (run_dir, begun, other)]  # two are called r
    assert all(f">{name}</a>" in page for name in names)
    differing = text.partition("Settings that differ")[2].partition("settings of the last")[0]
    assert re.search(r"weight_decay 0\.1 0\.1 0\.5", differing)
    assert "seed 1337" not in differing, "nobody chose it"
    series = hovers(page)[0]["series"]
    assert [one["name"].partition(",")[0] for one in series] == [names[0]] * 2 + [names[2]] * 2
    assert [one["colour"] for one in series] == ["c0", "c0", "c1", "c1"]
    assert text.count("No forecast was written, or no step was taken.") == 1
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', page)) <= set(ids)


@pytest.mark.parametrize(("has_bytes", "unit"), [(True, "bits/byte"), (False, "not comparable")])
def test_losses_of_different_tokenizers_are_drawn_by_the_byte(run_dir, has_bytes, unit):
    other = Path(shutil.copytree(run_dir, run_dir.with_name("other")))
    edit_json(other / "run.json", tokenizer={"name": "characters"})
    for folder, per_nat in ((run_dir, 0.5), (other, 2.0)):
        append(folder, event="eval", val_loss=4.0, val_loss_se=0.4, bits_per_byte=4.0 * per_nat)
        if not has_bytes:
            log = (folder / "metrics.jsonl").read_text()
            (folder / "metrics.jsonl").write_text(log.replace("bits_per_byte", "unknown"))
    panel = curves.panels_of([curves.read_curves(folder) for folder in (run_dir, other)])[0]
    assert unit in panel.title
    measured = [line.curve for line in panel.lines if line.curve.error is not None]
    shown = [(curve.y[-1], curve.error[-1]) for curve in measured]
    assert shown == ([(2.0, 0.2), (8.0, 0.8)] if has_bytes else [(4.0, 0.4)] * 2)


def test_numbers_that_no_chart_can_hold_leave_a_page(run_dir):
    """A damaged or made-up log must not end in a traceback, nor in a path that no browser reads."""
    wild = {"event": "step", "tokens": 320, "lr": -1e308, "tokens_per_second": 1e308}
    for step, number in enumerate((1e308, -1e308, float("nan"), float("inf"), 5e-324), start=5):
        append(run_dir, **wild, step=step, loss=number, grad_norm=number, step_seconds=0.1)
    paths = re.findall(r' d="([^"]*)"', render(run_dir))
    assert len(paths) > 20
    assert [path for path in paths if re.fullmatch(r"[MLHVh0-9,.-]+", path) is None] == []


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *(("begin", {"max_steps": None}), ("begin", {"world_size": "x"})),
        *(("resume", {"changes": {"max_lr": 1}}), ("step", {"loss": "high"})),
        *(("step", {"tokens": 1e300}), ("step", {"time": 1e30})),
        ("step", {"remaining_seconds": float("inf")}),
        *(("eval", {"val_loss": [1.0]}), ("eval", {"val_loss_by_source": ["a"]})),
        *(("hellaswag", {"n": None}), ("sample", {"text": 5}), ("mixture", {"weights": None})),
        *(("rewind", {"spike_step": "x"}), ("warning", {"message": ["x"]})),
        ("done", {"reason": None}),
    ],
)
def test_an_event_of_another_shape_is_left_out_and_named(run_dir, kind, changes):
    found = [*launch.events(run_dir, kind), {"event": kind, "time": 1.0, "attempt": 2, "step": 4}]
    append(run_dir, **found[0] | changes)
    number = len((run_dir / "metrics.jsonl").read_text().splitlines())
    name = next(iter(changes))
    where = f"{run_dir / 'metrics.jsonl'} line {number}: not an event of gpt2lab ({kind}: '{name}'"
    if name == "time":
        where = where.replace(f"{kind}: ", "")
    status = call("status", "--checkpoint_dir", run_dir.parent)
    assert (status.returncode, where in status.stdout) == (0, True), status
    for program in ("report", "plot"):
        done = call(program, "r", "--checkpoint_dir", run_dir.parent)
        assert (done.returncode, where in done.stderr) == (0, True), done
        warn_once.cache_clear()
    assert "completed" in text_of(render(run_dir))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("estimate.json", {"estimate": {"estimated_hours": None}}, "'estimate' is "),
        ("run.json", {"initial_weights": "x"}, "'initial_weights' is 'x'"),
        ("evaluations/step_00000004.json", {"step": 4, "attempt": 2, "tasks": 5}, "'tasks' is 5"),
    ],
)
def test_a_file_of_the_run_of_another_shape_is_left_out_and_named(run_dir, name, content, said):
    (run_dir / "evaluations").mkdir()
    (run_dir / name).write_text(json.dumps(content))
    code, _, error = call("report", "r", "--checkpoint_dir", run_dir.parent)
    assert code == 0
    (line,) = [line for line in error.splitlines() if name in line]
    assert line.startswith(f"warning: {run_dir / name}: {said}")


def test_peak_memory_is_the_most_of_all_starts(run_dir):
    events = launch.all_events(run_dir)
    for event in events:
        if event["event"] == "step":
            left_behind = (event["attempt"], event["step"]) == (1, 3)
            event["peak_memory_bytes"] = 3 * 2**30 if left_behind else 2**30
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    document = json.loads((run_dir / "estimate.json").read_text())
    edit_json(run_dir / "estimate.json", memory=(document["memory"] or {}) | {"total": 6 * 2**30})
    wanted = "memory 6.00 GiB - 3.00 GiB 200% of the actual peak"
    assert wanted in text_of(render(run_dir))


@pytest.mark.parametrize("last", ["done", "warning"])
def test_a_complete_run_goes_on_with_more_steps(run_dir, last):
    if last == "warning":
        append(run_dir, event="warning", message="the mirror is full")
    text = text_of(render(run_dir))
    assert "--max_steps 8 --allow_change max_steps" in text
    assert "--max_steps 8 --allow_change max_steps" in describe_run(run_dir)
    rates = [step["tokens_per_second"] for step in launch.steps(run_dir).values()][2:]  # warm
    assert f"{statistics.median(rates):,.0f} tokens/s (median" in describe_run(run_dir)


def test_a_run_that_took_no_step_lacks_its_beginning_or_goes_on_is_reported_as_such(run_dir):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = "".join(line for line in lines if '"event": "begin"' not in line)
    (run_dir / "metrics.jsonl").write_text(kept)
    assert "step 4 " in text_of(render(run_dir))
    assert "4/n/a" in call("status", "--checkpoint_dir", run_dir.parent).stdout
    edit_json(run_dir / "estimate.json", actual=None)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:-1]))  # without `done`
    assert re.search(r"time \S+ .*? so far tokens/s", text_of(render(run_dir)))
    edit_json(run_dir / "estimate.json", actual={"hours": 1.0, "time_accuracy": None})
    assert re.search(r"time \S+ .*? or without CORE tokens/s", text_of(render(run_dir)))
    begin, step = (
        next(i for i, line in enumerate(lines) if f'"event": "{kind}"' in line)
        for kind in ("begin", "step")
    )
    (run_dir / "metrics.jsonl").write_text("".join(lines[: step + 1]))
    assert "Continue with" in render(run_dir)
    for checkpoint in run_dir.glob("step_*"):
        shutil.rmtree(checkpoint)
    assert re.search('class="grey points" d="M[0-9,]*h0"', page := render(run_dir)), "one step"
    assert "Continue with" not in page
    (run_dir / "metrics.jsonl").write_text("".join(lines[: begin + 1]))
    assert "No step was taken." in render(run_dir)
    (run_dir / "metrics.jsonl").unlink()
    assert "No step was taken." in render(run_dir)


def test_many_samples_are_spread_over_the_run(run_dir):
    for step in range(5, 105):
        append(run_dir, event="sample", step=step, text=f"text {step}", seconds=0.1)
    text = text_of(render(run_dir))
    assert ("16 of 102, spread over the run" in text, "text 104" in text) == (True, True)


@pytest.mark.parametrize(
    "words",
    [
        *("", "RUN RUN", "RUN --out x.pdf", "RUN --out nowhere/x.html"),
        *("EMPTY", "DAMAGED", "no_such_run --checkpoint_dir EMPTY"),
    ],
)
def test_a_report_that_cannot_be_written_is_one_line(run_dir, tmp_path, words, wording):
    (tmp_path / "empty").mkdir()
    damaged = Path(shutil.copytree(run_dir, tmp_path / "damaged"))
    (damaged / "metrics.jsonl").write_text("no\n")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    names = {"RUN": run_dir, "EMPTY": tmp_path / "empty", "DAMAGED": damaged}
    wording(launch.rejected(call("report", *(names.get(word, word) for word in words.split()))))
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


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
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={profile}"]
    command += ["--virtual-time-budget=2000", *flags, page.resolve().as_uri()]
    return str(launch.worked(subprocess.run(command, **launch.TO_ITS_END)).stdout)


@needs_browser
def test_hostile_text_is_shown_and_does_nothing(run_dir, tmp_path, listener):
    text = hostile(listener.server_port)
    append(run_dir, event="sample", text=text, seconds=0.1)
    append(run_dir, message=text)
    edit_json(run_dir / "config.json", sample_prompt=text)
    other = f'"\'><script>{ACTS}<script><img src=x onerror="{ACTS}">'
    shutil.copytree(run_dir, run_dir.with_name(other))
    name, page = html.escape(f"r, {other}", quote=False), tmp_path / "page.html"
    launch.worked(call("report", run_dir, run_dir.with_name(other), "--out", page))
    document = browse(page, "--dump-dom")
    assert f"<title>{name}</title>" in document
    assert not re.findall(r"<(?:img|svg onload)", document)
    assert (document.count("<script"), document.count("<style")) == (1, 1)  # its own
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
    at = content.index(escaped, content.index('id="samples-1"'))
    raw = text.encode("utf-8", "replace").decode()
    unescaped = tmp_path / "unescaped.html"
    unescaped.write_text(content[:at] + raw + content[at:])
    document = browse(unescaped, "--dump-dom")
    assert f"<script>{ACTS}</script>" in document  # it is there as an element
    assert f"<title>{name}</title>" in document
    assert Listener.asked == []


@needs_browser
def test_the_page_is_drawn_with_its_style_and_its_curves(run_dir, tmp_path):
    from matplotlib.image import imread

    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(render(run_dir))
    light = "--blink-settings=preferredColorScheme=1"
    browse(page, light, f"--screenshot={picture}", "--window-size=1280,1000", "--hide-scrollbars")
    pixels = (imread(picture)[:, :, :3] * 255).round().astype(int)
    assert pixels.shape == (1000, 1280, 3)

    def count(*colour: int) -> int:
        return int((abs(pixels - colour).max(axis=2) <= 2).sum())

    assert count(0xDF, 0xF3, 0xEA) > 300  # the badge of a completed run: the style sheet applies
    assert count(0x00, 0x72, 0xB2) > 200  # curves


MEASURE = Path(__file__).with_name("measure.js")


def measured(page: Path, *, width: int, is_dark: bool) -> dict[str, Any]:
    """Return what measure.js finds in a page, without the policy that would hold it back."""
    content = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    content = content.replace("</body>", f"<script>{{{MEASURE.read_text()}}}</script></body>")
    frame = f'<iframe width="{width}" height="900" srcdoc="{html.escape(content)}"></iframe>'
    copy = page.with_name(f"{page.stem}-{width}-{is_dark}.html")  # a window is never below 500 wide
    copy.write_text(f'<!DOCTYPE html><meta name="color-scheme" content="light dark"><body>{frame}')
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    document = browse(copy, scheme, "--window-size=1400,900", "--hide-scrollbars", "--dump-dom")
    found = re.search(r"<body>(.*?)</body>", document, re.DOTALL)
    values: dict[str, Any] = json.loads(html.unescape(found[1]))
    return values


def luminance(colour: str) -> float:
    """Return the relative luminance of `rgb(r, g, b)` (WCAG 2.2)."""
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800, 400])
@pytest.mark.parametrize("runs", [1, 3])
def test_the_page_is_readable_at_any_width_in_both_schemes(run_dir, tmp_path, runs, width, is_dark):
    append(run_dir, message=f"look at {'/a/long/path' * 12}.npy")
    append(run_dir, event="sample", text="word" * 300, seconds=0.1)
    for step in range(5, 60):
        scores = {"acc_norm": 0.25 + step / 1e3, "acc_norm_se": 0.004, "n": 10_042}
        append(run_dir, event="hellaswag", step=step, **scores, seconds=1.0)
    more = [run_dir.with_name(f"gpt2-micro_20261121-23542{i}") for i in range(runs - 1)]
    folders = [run_dir, *(Path(shutil.copytree(run_dir, folder)) for folder in more)]
    page = tmp_path / "page.html"
    page.write_text(render(*folders))
    found = measured(page, width=width, is_dark=is_dark)
    assert (found["width"], found["dark"]) == (width, is_dark)
    bright, dark = sorted(map(luminance, (found["paper"], found["ink"])), reverse=True)
    assert (bright + 0.05) / (dark + 0.05) > 7  # WCAG 2.2, level AAA
    assert (luminance(found["paper"]) < 0.1) == is_dark
    assert found["texts"] > 100
    assert found["smallest"] >= 12  # pixels, in charts too
    assert len(found["scaled"]) > 20
    assert all(0.9 < share < 1.6 for share in found["scaled"])  # no chart shrinks its text
    assert (found["overflow"], found["outside"]) == (0, [])
    assert (found["broken"], found["overlaps"]) == ([], [])
    assert found["cut"] == 0  # the verdicts of the forecast
    assert found["scrolls"] >= (1 if width < 1280 else 0)
    first, middle, last = found["tips"]
    assert re.match(r"step 0\n.*training, running median: [\d.]+ at step 1\n", first["text"])
    assert last["text"].startswith("step 4\n")
    assert "validation ± standard error: " in middle["text"]
    assert all(tip["left"] >= 0 and tip["right"] <= width for tip in found["tips"])
    assert all(tip["inside"] for tip in found["tips"])  # over its chart, not below
    assert found["hidden"]
    assert [set(axes) for axes in found["axes"]] == [{"step"}, {"tokens"}, {"hours"}]


def test_the_labels_of_an_axis_differ_and_have_no_more_digits_than_they_need():
    for low, high, is_log in (
        *((12_300, 12_340, False), (1_234_567, 1_234_571, False), (9_000.001, 9_000.004, False)),
        *((3.2, 3.3, True), (0.0, 1.0, False), (0.1, 30.0, True)),
    ):
        ticks = Scale(low, high, is_log).ticks()
        texts = [text for _, text in ticks]
        assert 2 <= len(texts) == len(set(texts)), texts
        assert all(low - 1e-9 <= value <= high + 1e-9 for value, _ in ticks)
    assert [text for _, text in Scale(0.0, 0.5).ticks()] == ["0", "0.1", "0.2", "0.3", "0.4", "0.5"]
    assert [text for _, text in Scale(10_000, 15_000).ticks()][:2] == ["10K", "11K"]
    assert [text for _, text in Scale(12_300, 12_340).ticks()][:2] == ["12.3K", "12.31K"]
