"""make first-card: from recorded stages of a card to its file and page; on a CPU for real."""

import json
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import card_page, first_card, trainers
from benchmarks.sizes import SIZES, VARIANTS, fitted
from fake_trainer import plan
from gpt2lab.errors import CheckError, ConfigError
from gpt2lab.planner.machine import DetectedHardware
from launch import REPOSITORY, call, environment, words_of, write_program

RECORDED = REPOSITORY / "tests" / "golden" / "first_card.json"  # as of an H200, made up
GIB = 2**30
SMI = """#!/bin/sh
case "$*" in
  *driver_version,uuid*) echo "0, NVIDIA H200, 143771, 143000, 580.65, GPU-1, 0, 9.0, 90, 1980, 0x0" ;;
  *name,driver_version*) echo "NVIDIA H200, 580.65" ;;
esac
"""


def recorded() -> dict[str, Any]:
    return dict(json.loads(RECORDED.read_text()))


def run_recorded(monkeypatch, out: Path, **how: Any) -> int:
    """Run the command with stages that return what was recorded; reliability has these `problems`."""
    problems = how.pop("problems", [])

    def act(name: str) -> Any:
        stage = recorded()["stages"][name] | {"problems": problems if name == "reliability" else []}
        del stage["verdict"], stage["seconds"]
        return lambda bench: stage

    stages = {name: (act(name), share) for name, (_, share) in first_card.STAGES.items()}
    monkeypatch.setattr(first_card, "STAGES", stages)
    plain: dict[str, Any] = {"minutes": 25, "start": "doctor", "device": "cuda", "peers": ()}
    return first_card.run_card(out=out, **plain | how)


def test_the_page_shows_the_predictions_that_the_command_judges():
    page = (REPOSITORY / "docs" / "gpu_results.md").read_text()
    groups = dict.fromkeys(one["id"].partition(".")[0] for one in card_page.predictions())
    for group in groups:
        assert card_page.table_of_predictions(group) in page
    ids = [one["id"].removeprefix("sweep.") for one in card_page.predictions()]
    assert [name for name in ids if name in VARIANTS] == list(VARIANTS)
    assert page.partition("```bash\n")[2].startswith("make first-card\n")
    assert len(page.split()) <= 2000


def test_stages_become_one_file_without_names_and_paths(monkeypatch, tmp_path, capsys):
    bad = f"{Path.home()}/secret/run.json of {platform.node()}: 3 tokens/s"
    assert run_recorded(monkeypatch, tmp_path / "c.json", problems=[bad]) == 1
    text = (tmp_path / "c.json").read_text()
    assert len(text) < first_card.LARGEST
    found, expected = json.loads(text), recorded()
    assert found["stages"]["reliability"]["problems"] == ["run.json of ***: 3 tokens/s"]
    assert found["stages"]["reliability"]["verdict"] == "failed"
    for name in ("reliability", *found["stages"]):
        for card in (found, expected):
            card["stages"][name] |= {"seconds": 0, "problems": [], "verdict": "passed"}
    assert found | {"commit": None} == expected | {"commit": None}
    page = (tmp_path / "c.md").read_text()
    assert page in capsys.readouterr().out
    assert "| `ceilings.copy` | 4.1 to 4.5 TB/s | 4.3 | inside |" in page
    # The stage goes on where it failed, and the rest is kept.
    assert run_recorded(monkeypatch, tmp_path / "c.json", start="reliability") == 0
    again = json.loads((tmp_path / "c.json").read_text())["stages"]
    assert list(again) == list(first_card.STAGES)
    assert again["speed"] == json.loads(text)["stages"]["speed"]
    # A file is at most 100 kB.
    assert run_recorded(monkeypatch, tmp_path / "d.json", problems=["x" * 1000] * 200) == 1
    assert len((tmp_path / "d.json").read_text()) < first_card.LARGEST


@pytest.mark.parametrize(("gpus", "parts"), [(1, 22), (2, 27)])
def test_a_stage_may_take_its_share_of_what_is_left(gpus, parts):
    names, end = list(first_card.STAGES), time.monotonic() + 60 * parts
    assert first_card._seconds_for(names[1:], end, gpus) == pytest.approx(9 * 60, rel=0.1)
    assert first_card._seconds_for(names[-2:], end, 1) == pytest.approx(60 * parts, rel=0.1)


@pytest.mark.parametrize(
    ("card", "name", "verdict"),
    [
        ("NVIDIA H200", "speed.gpt2", "inside"),
        ("NVIDIA H200", "speed.gpt2_h100", "predicted for an H100"),
        ("NVIDIA GH200 480GB", "speed.gpt2", "predicted for an H200"),
        ("NVIDIA H200 NVL", "speed.gpt2", "predicted for an H200"),
        ("NVIDIA H100 80GB HBM3", "speed.gpt2", "predicted for an H200"),
        ("NVIDIA H100 80GB HBM3", "speed.cross_entropy", "inside"),
        ("NVIDIA H200", "sweep.muon", "above"),
        ("NVIDIA H200", "speed.gpt2-xl", "not measured"),
    ],
)
def test_a_prediction_is_judged_on_the_card_that_it_was_made_for(card, name, verdict):
    assert card_page.verdicts(recorded()["stages"], card=card)[name]["verdict"] == verdict


def test_the_loss_kernel_is_judged_only_where_it_ran():
    stages = recorded()["stages"]
    for row in stages["speed"]["trainers"]:
        row["loss_kernel"] = "inductor"
    found = card_page.verdicts(stages, card="NVIDIA H100 80GB HBM3")
    for name in ("speed.gpt2_kernel", "speed.cross_entropy"):
        assert found[name]["verdict"] == "not measured"
    assert found["speed.gpt2_h100"]["verdict"] == "inside"


def test_a_wrong_curve_makes_later_speeds_untrusted(monkeypatch, tmp_path):
    """From what pytest writes; the second call has no failure."""
    case = '<testsuite><testcase name="a"/><testcase name="b"><skipped/></testcase>{}</testsuite>'
    bad = '<testcase name="follows"><failure message="loss 3 != 4&#10;more"/></testcase>'
    bench = first_card.Bench("cpu", 1, 8, (), tmp_path, 1e12)

    def run(self: Any, *words: str) -> Any:
        path = Path(words[-1].removeprefix("--junitxml="))
        path.write_text(case.format(bad if path.stem == "curves" else ""))
        return SimpleNamespace(returncode=int(path.stem == "curves"), stdout="", stderr="")

    monkeypatch.setattr(first_card.Bench, "run", run)
    found = first_card.tests(bench)
    wrong = "a loss curve is wrong: do not trust the speeds below"
    assert found["problems"] == [wrong, "follows: loss 3 != 4"]
    assert found["counts"]["curves"] == {"passed": 1, "failed": 1, "skipped": 1}


def test_tests_that_ended_before_the_stages_time_was_over_are_kept(monkeypatch, tmp_path):
    """A real pytest of a test that ends and one that does not, in place of the card's."""
    (tmp_path / "test_two.py").write_text(
        "import pathlib, time\n\n\ndef test_ends(): pass\n\n\ndef test_never():\n"
        f"    pathlib.Path({str(tmp_path / 'began')!r}).touch()\n    time.sleep(1000)\n"
    )
    bench = first_card.Bench("cpu", 1, 8, (), tmp_path, 1e12)
    began, run, wait = tmp_path / "began", first_card.Bench.run, subprocess.Popen.wait

    def of_two(self: Any, *words: str) -> Any:
        kept = [word for word in words if word.startswith("--junitxml")]
        return run(self, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_two.py", *kept)

    def late(self: Any, timeout: float | None = None) -> int:
        """Be over with the first process's second test begun, as if that had taken its time."""
        if timeout != 600.0:
            return wait(self, timeout)
        while not began.exists():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("pytest", 600.0)

    monkeypatch.setattr(first_card, "REPOSITORY", tmp_path)
    monkeypatch.setattr(first_card.Bench, "left", property(lambda self: 600.0))
    monkeypatch.setattr(first_card.Bench, "run", of_two)
    monkeypatch.setattr(subprocess.Popen, "wait", late)
    found = first_card.tests(bench)
    assert found["counts"]["curves"] == {"passed": 1, "failed": 0, "skipped": 0}
    assert found["problems"][0] == "curves: not done when the stage's time was over"


def test_without_a_card_that_torch_can_use_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    none = call("benchmark", "first-card", folder=tmp_path)
    write_program(tmp_path / "nvidia-smi", SMI)
    monkeypatch.setattr("gpt2lab.distributed.processor.build_of_torch", lambda: ("2.13.0", None))
    unseen = call("benchmark", "first-card", folder=tmp_path)
    for done, words in ((none, "--device cpu"), (unseen, "NVIDIA H200 with driver 580.65")):
        assert done.returncode == 2
        assert "NO-GO: nvidia-smi" in done.stderr.splitlines()[-1]
        assert words in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nvidia-smi"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from=speed"], "there is no first_card.json to continue"),
        (["--from=sweep", "--out=c.json"], "c.json has no stage planner; --from planner"),
        (["--from=planner", "--out=c.json", "--device=cpu"], "c.json is of commit abc"),
        (["--out=c.json"], "c.json exists"),
        (["--from=speed", "--out=other.json"], "other.json is not a gpt2lab-card/1"),
        (["--out=c.txt"], "end it with .json"),
    ],
)
def test_wrong_flags(words, said, tmp_path):
    card = recorded() | {"commit": "abc"}
    card["stages"] = {name: card["stages"][name] for name in ("doctor", "tests", "speed")}
    (tmp_path / "c.json").write_text(json.dumps(card))
    (tmp_path / "other.json").write_text("{}")
    done = call("benchmark", "first-card", *words, folder=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert json.loads((tmp_path / "c.json").read_text()) == card


def test_the_micro_batch_is_the_largest_power_of_two_that_fits_or_refused():
    for free, micro_batch in ((140, 64), (44, 64), (30, 32), (15, 16), (6, 4)):
        found = fitted(SIZES["gpt2"], free * GIB)
        assert (found.mini_batch_size, found.tokens) == (micro_batch, SIZES["gpt2"].tokens)
    assert fitted(SIZES["gpt2"], None) == SIZES["gpt2"]
    with pytest.raises(ConfigError, match="not even one sequence"):
        fitted(SIZES["gpt2"], 2 * GIB)


def test_out_of_memory_halves_the_micro_batch_once(monkeypatch):
    sizes, gpt2 = list[int](), plan(models=("gpt2",), device="cuda")
    monkeypatch.setattr(trainers, "detect_hardware", lambda: DetectedHardware(()))

    def compare_at(name: str, size: Any, *others: Any, largest: int | None) -> dict[str, Any]:
        sizes.append(size.mini_batch_size)
        if len(sizes) in fails:
            raise CheckError("ours ended by itself: error: out of memory: CUDA out of memory.")
        return {}

    monkeypatch.setattr(trainers, "_compare_at", compare_at)
    fails = [1]
    assert trainers.compare(gpt2, print) == {"gpt2": {"micro_batch": 32, "halved": True}}
    assert sizes == [64, 32]
    fails = [3, 4]
    with pytest.raises(CheckError, match="out of memory"):
        trainers.compare(gpt2, print)


def test_a_variant_that_does_not_fit_is_left_out(tmp_path):
    every = plan(variants=tuple(VARIANTS), peers=(("hf", None),), device="cuda")
    tried = trainers._contestants(every, SIZES["gpt2"], tmp_path)
    names = [contestant.name for contestant in trainers.fitting(tried, largest=64)]
    # Variants come last: where time is short, they are left out before other trainers.
    assert names == ["ours", "hf", *(name for name in VARIANTS if name != "micro_double")]
    assert trainers.fitting(tried, largest=128) == trainers.fitting(tried, largest=None) == tried


def assert_within(found: Any, known: Any, place: str) -> None:
    """Every key that a stage writes is one of the recorded file's, with the same kind of value."""
    if isinstance(found, dict) and place.rpartition(".")[2] not in ("operators", "ours_is_times"):
        assert set(found) <= set(known), place
        for key in found:
            assert_within(found[key], known[key], f"{place}.{key}")
    elif isinstance(found, list) and found and known:
        assert_within(found[0], known[0], f"{place}[]")
    elif found is not None and known is not None:
        assert isinstance(found, type(known)) or {type(found), type(known)} <= {int, float}, place


@pytest.mark.slow
def test_the_whole_command_on_a_cpu(tmp_path):
    """Interrupted in the tests, and continued there; nothing is compiled, which saves minutes."""
    words = [*words_of("benchmark"), "first-card", "--device=cpu", "--minutes=12"]
    extra: dict[str, Any] = {"env": environment(TORCHDYNAMO_DISABLE="1"), "cwd": tmp_path}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(words, **extra, **pipes)
    for line in first.stdout:
        if line.startswith("tests: at most"):
            break
    while not psutil.Process(first.pid).children():  # its pytest has begun
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    assert "interrupted; continue with --from tests" in first.communicate()[1]
    assert first.returncode == 1
    done = subprocess.run([*words, "--from=tests"], **extra, **pipes, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found, known = json.loads((tmp_path / "first_card.json").read_text()), recorded()
    verdicts = {name: stage["verdict"] for name, stage in found["stages"].items()}
    assert verdicts == dict.fromkeys(first_card.STAGES, "passed") | {"tests": "skipped"}
    assert_within(found, known, "card")
    assert found["stages"]["reliability"]["level"] == ["bit-identical"]
    assert found["stages"]["cards"]["saved_after_kill"] == [19]
    for text in (str(tmp_path), platform.node(), sys.executable, str(REPOSITORY)):
        assert text not in json.dumps(found)
