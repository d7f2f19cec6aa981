"""Everything that a machine's first card has to tell, in one command and one file.

The stages are doctor, tests, speed, planner, reliability, cards and sweep. After each, the JSON is written again as a
whole, so that whatever ends the command costs one stage. Every measurement is a program of its own. No torch here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import card_page, contestants
from benchmarks.contestants import Device, Place
from benchmarks.sizes import SIZES, Size, StageName, Variant, fitted
from benchmarks.token_stream import markov_tokens, write_formats
from gpt2lab.commands.doctor import without_names
from gpt2lab.distributed.processor import smi, unseen_gpus
from gpt2lab.errors import CheckError, ConfigError, GPT2LabError
from gpt2lab.files import replace_durably
from gpt2lab.paths import REPOSITORY
from gpt2lab.planner.estimate import GUESS
from gpt2lab.planner.machine import detect_hardware
from gpt2lab.runs import history
from gpt2lab.runs.console import doing
from gpt2lab.runs.folder import git_commit
from gpt2lab.training.progress import Interval

SCHEMA = "gpt2lab-card/1"
LARGEST = 100_000  # bytes of the JSON
_CURVES = "follows or none or agree or as_one or resume or back or deterministic or curve"
_WORKER = Path(__file__).with_name("card_worker.py")
_STEPS, _WARM_UP = 30, 5
_LAST_WORDS_SECONDS = 20  # that a program has to end after a signal
_DOCTOR_SECONDS = 120


class _SkippedError(Exception):
    """A stage that this machine does not allow, and why."""


@dataclass
class Bench:
    """What a stage works with."""

    device: Device
    gpus: int  # cards; on a CPU processes
    micro_batch: int  # as the doctor found, or stage `speed` after it; the same all along, or bits would differ
    peers: tuple[str, ...]
    folder: Path  # the stage's own
    end: float  # moment by the monotonic clock at which the stage must have ended

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    @property
    def size(self) -> Size:
        """What is trained: GPT-2, on a CPU a tiny model with short sequences."""
        whole = SIZES["gpt2"]
        if self.device == "cpu":
            whole = dataclasses.replace(SIZES["tiny256"], context_length=64)
        return Variant(micro_batch=self.micro_batch / whole.mini_batch_size).cut(whole)

    def run(self, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these words to its end.

        Raises: CheckError if the stage has no time left.
        """
        paths = os.pathsep.join(str(REPOSITORY / name) for name in ("", "src", "tests"))
        out, err = self.folder / "stdout.txt", self.folder / "stderr.txt"
        with open(out, "w") as to_out, open(err, "w") as to_err:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": paths, **extra},
                stdin=subprocess.DEVNULL,
                stdout=to_out,
                stderr=to_err,
                start_new_session=True,  # a Ctrl+C is for this command, which ends all
            )
            try:
                process.wait(max(1.0, self.left))
            except subprocess.TimeoutExpired:
                raise CheckError("not done when the stage's time was over") from None
            finally:
                _end(process)
        said, errors = (path.read_text(errors="replace") for path in (out, err))
        return subprocess.CompletedProcess(words, process.returncode, said, errors)

    def measure(self, *words: str) -> dict[str, Any]:
        """Run a verb of `gpt2lab benchmark` and return its JSON.

        Raises: CheckError if it wrote none.
        """
        path = self.folder / "measured.json"
        done = self.run("-m", "gpt2lab", "benchmark", *words, "--json", str(path))
        if not path.exists():
            raise CheckError(_last_line(done))
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def train(self, name: str, flags: dict[str, Any], *, world: int = 1, **extra: str) -> Path:
        """Train a short run of `size` with these flags besides, and return its folder.

        Raises: CheckError if it fails.
        """
        done, run = self.try_to_train(name, flags, world=world, **extra)
        if done.returncode:
            raise CheckError(f"{name}: {_last_line(done)}")
        return run

    def try_to_train(
        self, name: str, flags: dict[str, Any], *, world: int = 1, **extra: str
    ) -> tuple[subprocess.CompletedProcess[str], Path]:
        """Train such a run, and return also how it ended."""
        data = self.folder / "data"
        if not data.exists():
            tokens = 1_000_000 if self.device == "cpu" else 4_000_000
            write_formats(markov_tokens(tokens, vocab_size=self.size.vocab_size), data)
        place = Place(self.folder / name, data, self.folder, self.device)
        short = {"max_steps": _STEPS, "sample_freq": 0, "eval_freq": 0, **flags}
        switches = [f"--{key}" for key, value in short.items() if value is True]
        text = {key: str(value) for key, value in short.items() if value is not True}
        started = contestants.ours(place, self.size, dtype="auto", variant=(name, Variant(text)))
        ranks = [f"--gpus={world}"] if world > 1 else []
        return self.run(*started.program, *switches, *ranks, **extra), place.folder / "run"


def _end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """End a program with what it started: asked first, so that it ends programs in groups of their own.

    On SIGINT pytest reports the tests that have ended, and the trainer saves; on SIGTERM pytest reports nothing.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_SECONDS)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1] if lines else f"ended with exit code {done.returncode} and without a word"


# -- stages: each returns what it found, and its `problems` in words; without any it has passed ----------------------


def doctor(bench: Bench) -> dict[str, Any]:
    """Look at driver, builds, compiler, memory and other users of the card.

    Raises: ConfigError with the line that mends it, if nothing can be measured.
    """
    gpus = detect_hardware(device=bench.device).gpus
    if bench.device == "cuda":
        if not gpus:
            raise ConfigError(
                "NO-GO: nvidia-smi names no card; install the driver, or try the command with --device cpu"
            )
        if why := unseen_gpus():
            raise ConfigError(f"NO-GO: {why}")
    done = bench.run(str(_WORKER), "facts", bench.device)
    if done.returncode:
        raise ConfigError(f"NO-GO: torch does not start: {_last_line(done)}")
    facts = json.loads(done.stdout)
    if bench.device == "cuda" and not facts["cards"]:
        raise ConfigError(
            "NO-GO: torch sees no card; run nvidia-smi, and look at CUDA_VISIBLE_DEVICES"
        )
    if facts["missing"]:
        raise ConfigError(f"NO-GO: training would not be compiled: {facts['missing']}")
    problems, facts["micro_batch"] = [], SIZES["tiny256"].mini_batch_size
    if bench.device == "cuda":
        fits = fitted(SIZES["gpt2"], detect_hardware().free_memory(1))
        facts["micro_batch"] = fits.mini_batch_size
        facts["mig"] = smi("--query-gpu=mig.mode.current", "--format=csv,noheader").split("\n")[0]
        others = smi("--query-compute-apps=pid", "--format=csv,noheader").split()
        if others:
            problems.append(f"{len(others)} other programs use the card; speeds are not its own")
    cards = [
        {"name": one.name, "driver": one.driver, "capability": one.capability}
        | {"free_bytes": one.memory_free, "bytes": one.memory_total, "clock": one.clock}
        | {"watts": one.power, "throttle": one.throttle}
        for one in gpus
    ]
    return facts | {"gpus": cards, "problems": problems}


def tests(bench: Bench) -> dict[str, Any]:
    """Run the tests of a GPU, those of the loss curves first."""
    if importlib.util.find_spec("xdist") is None:
        raise CheckError("pytest-xdist is not installed; pip install -r requirements-dev.txt")
    found: dict[str, Any] = {"counts": {}, "failed": []}
    for kind, wanted in (("curves", _CURVES), ("others", f"not ({_CURVES})")):
        report = bench.folder / f"{kind}.xml"
        words = ["-m", "pytest", "-m", "gpu", "tests/gpu/test_gpu.py", "-k", wanted, "-q"]
        words += [f"-n{workers()}", "--dist=worksteal", "-p", "no:cacheprovider"]
        # Where pytest-benchmark is installed, it warns of workers, which ends the tests.
        words += ["-p", "no:benchmark"]
        limit = f"--session-timeout={max(1, bench.left - 30):.0f}"  # ends after a test
        late = ""
        try:
            done = bench.run(*words, limit, f"--junitxml={report}")
        except CheckError as error:
            late = str(error)  # pytest reports what had ended by then
        if not report.exists() and not late:
            raise CheckError(f"pytest: {_last_line(done)}")
        counts, failed = read_junit(report)
        found["counts"][kind] = counts
        found[f"{kind}_failed"] = bool(failed)
        if late:
            failed.append({"test": kind, "why": late})
        elif done.returncode not in (0, 5) and not failed:  # 5: no test was wanted
            failed = [{"test": kind, "why": f"not all tests ran: {_last_line(done)}"}]
        found["failed"] += failed
    ran = sum(counts["passed"] + counts["failed"] for counts in found["counts"].values())
    if not ran and not found["failed"]:
        skipped = sum(counts["skipped"] for counts in found["counts"].values())
        raise _SkippedError(f"all {skipped} tests need a card")
    problems = [f"{one['test']}: {one['why']}" for one in found["failed"]]
    if found["curves_failed"]:
        problems.insert(0, "a loss curve is wrong: do not trust the speeds below")
    return found | {"problems": problems}


def workers() -> int:
    """Return how many tests run at once: most seconds of one are a process that starts, on a core or two."""
    return max(1, min(6, (os.cpu_count() or 1) // 2))


def read_junit(path: Path) -> tuple[dict[str, int], list[dict[str, str]]]:
    """Return how many tests passed, failed and were skipped, and the failed ones with their first line.

    Without a report none has ended. In that of an interrupted pytest a running test has no name.
    """
    counts, failed = {"passed": 0, "failed": 0, "skipped": 0}, []
    for case in ElementTree.parse(path).iterfind(".//testcase[@name]") if path.exists() else ():
        bad = next((one for one in case if one.tag in ("failure", "error")), None)
        kind = "failed" if bad is not None else "passed"
        counts["skipped" if case.find("skipped") is not None else kind] += 1
        if bad is not None:
            why = (bad.get("message") or bad.text or "").strip().partition("\n")[0]
            failed.append({"test": case.get("name", ""), "why": why[:200]})
    return counts, failed


def speed(bench: Bench) -> dict[str, Any]:
    """Measure ceilings, ours first and last with other trainers between, and split a step by kinds of work."""
    peers = [word for peer in bench.peers for word in ("--peer", peer)]
    return _compare(bench, "--profile", *peers)


def sweep(bench: Bench) -> dict[str, Any]:
    """Measure variants of our settings while time lasts."""
    if bench.device == "cpu":
        return _compare(bench, "--variant", "micro_half", "muon")
    found = _compare(bench, "--sweep")
    found.pop("micro_batch", None)  # that of the stage `speed` stays
    return found


def _compare(bench: Bench, *words: str) -> dict[str, Any]:
    on_cpu = bench.device == "cpu"
    model, steps = ("tiny256", (2, 5)) if on_cpu else ("gpt2", (_WARM_UP, 15))
    counts = ("--warmup", str(steps[0]), "--steps", str(steps[1]))
    limit = ("--total_seconds", f"{max(1.0, bench.left - 30):.0f}")
    verb = "cpu" if on_cpu else "gpu"
    found = bench.measure(verb, "--model", model, *counts, *limit, *words)[model]
    for name, split in found.get("profile", {}).items():
        longest = sorted(split["operators"].items(), key=lambda item: -item[1])[:15]
        found["profile"][name]["operators"] = {key[:120]: value for key, value in longest}
    for row in found["trainers"]:
        del row["ratio_texts"]
    failed = found["failed"].items()
    return found | {"problems": [f"{name}: {why}" for name, why in failed]}


def planner(bench: Bench) -> dict[str, Any]:
    """Compare what was predicted before a run with the run: tokens/s, peak bytes, seconds of what is not training."""
    cold = str(bench.folder / "compiled")  # the predicted seconds are those without a cache
    flags = {"eval_freq": _STEPS // 2, "checkpoint_freq": _STEPS // 3}
    flags["val_tokens"] = 5_000 if bench.device == "cpu" else 50_000
    run = bench.train("planned", flags, TORCHINDUCTOR_CACHE_DIR=cold)
    forecast = json.loads((run / "estimate.json").read_text())
    log = history.read_log(run)
    events, steps = log.events, list(log.current_steps())
    rates = [step["tokens_per_second"] for step in steps[_WARM_UP:]]
    rate, memory = forecast["throughput"], forecast["memory"]
    context = memory["context"] if bench.device == "cuda" else 0  # which torch does not count
    peak, actual = memory["total"] - context, max(step["peak_memory_bytes"] for step in steps)
    found = [
        _forecast("tokens/s", rate["value"], rate["low"], rate["high"], statistics.median(rates)),
        _forecast("peak bytes", peak, 0, peak, actual),  # an upper bound
    ]
    compiling = sum(e["compile_seconds"] for e in events if e["event"] == "compile")
    evaluating = sum(e["seconds"] for e in events if e["event"] == "eval")  # the first compiles too
    saving = sum(history.stall_of(e) or 0 for e in events if e["event"] == "checkpoint")
    spent = {("compile", "eval"): compiling + evaluating, ("checkpoint",): saving}
    for kinds, seconds in spent.items():
        expected = sum(forecast["breakdown"][f"{kind}_s"] for kind in kinds)
        part = Interval.log_normal(max(expected, 1e-9), GUESS)
        name = f"{' and '.join(kinds)} seconds"
        found.append(_forecast(name, part.value, part.low, part.high, seconds))
    first = steps[0]["step_seconds"]
    return {"forecasts": found, "first_step_seconds": first, "problems": []}


def _forecast(what: str, value: float, low: float, high: float, actual: float) -> dict[str, Any]:
    inside = low <= actual <= high
    return {"what": what, "value": value, "low": low, "high": high} | {
        "actual": actual,
        "inside": inside,
    }


def reliability(bench: Bench) -> dict[str, Any]:
    """Save while training goes on, kill -9, resume, and compare every bit with the run that nobody disturbed."""
    batch = bench.size.mini_batch_size * bench.size.context_length * min(2, bench.size.accumulation)
    flags = {"deterministic": True, "checkpoint_freq": 10, "total_batch_size": batch}
    straight = bench.train("straight", flags | {"async_checkpoint": "on"})
    done, cut = bench.try_to_train("cut", flags, FAULT=f"step:kill9@{_STEPS - 8}")
    if done.returncode != -signal.SIGKILL:
        raise CheckError(f"the run to be killed ended by itself: {_last_line(done)}")
    bench.train("cut", flags | {"resume": "latest"})
    logs = [history.read_log(run) for run in (straight, cut)]
    saves = [e for e in logs[0].of_kind("checkpoint") if e["kind"] == "rolling"]
    resumed = [e["level"] for e in logs[1].of_kind("resume")]
    losses = [{step["step"]: step["loss"] for step in log.current_steps()} for log in logs]
    hashes = [_weights_hash(run) for run in (straight, cut)]
    problems = []
    if losses[0] != losses[1]:
        first = next(n for n in losses[0] if losses[0][n] != losses[1].get(n))
        problems.append(f"after the resume the loss of step {first} has other bits")
    if hashes[0] != hashes[1]:
        problems.append("after the resume the last weights have other bits")
    return {
        "stall_seconds": [e["stall_seconds"] for e in saves],
        "save_seconds": [e["seconds"] for e in saves],
        "save_bytes": [e["bytes"] for e in saves],
        "level": resumed,
        "weights_sha256": hashes,
        "losses": list(losses[0].values()),
        "problems": problems,
    }


def _weights_hash(run: Path) -> str:
    manifest = json.loads((run / f"step_{_STEPS:08d}" / "manifest.json").read_text())
    return str(manifest["files"]["model.safetensors"]["sha256"])


def cards(bench: Bench) -> dict[str, Any]:
    """Train with several ranks in each mode, time an all-reduce, and kill one rank: is the step before saved?"""
    if bench.gpus < 2:
        raise _SkippedError("one card")
    world = 2 ** (bench.gpus.bit_length() - 1)  # ranks that share a step evenly
    found: dict[str, Any] = {}
    size = bench.size
    micro = min(size.mini_batch_size, size.mini_batch_size * size.accumulation // world)
    ways = {"1": (1, "ddp"), "ddp": (world, "ddp"), "zero1": (world, "zero1")}
    for name, (ranks, mode) in (ways | {"fsdp": (world, "fsdp")}).items():
        flags = {"parallel": mode, "max_steps": 15, "mini_batch_size": micro}
        run = bench.train(f"mode_{name}", flags, world=ranks)
        steps = list(history.read_log(run).current_steps())
        found[name] = statistics.median(step["tokens_per_second"] for step in steps[_WARM_UP:])
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    done = bench.run(*ranks, str(_WORKER), "all_reduce", bench.device, OMP_NUM_THREADS="1")
    if done.returncode:
        raise CheckError(f"all-reduce: {_last_line(done)}")
    flags = {"checkpoint_freq": 0, "hang_seconds": 60, "mini_batch_size": micro}
    _, run = bench.try_to_train("killed", flags, world=world, FAULT="step:kill9@20,rank=1")
    saved = sorted(int(path.name.removeprefix("step_")) for path in run.glob("step_*"))
    problems = [] if 19 in saved else [f"a rank died in step 20, and step 19 is not saved: {saved}"]
    rate = json.loads(done.stdout.strip().splitlines()[-1])["bytes_per_second"]
    return {"ranks": world, "tokens_per_second": found, "saved_after_kill": saved} | {
        "all_reduce_bytes_per_second": rate,
        "problems": problems,
    }


# The stages with their shares of the time: minutes of 22, or with several cards of 27.
STAGES: dict[StageName, tuple[Callable[[Bench], dict[str, Any]], float]] = {
    "doctor": (doctor, 0),
    "tests": (tests, 9),
    "speed": (speed, 5),
    "planner": (planner, 2),
    "reliability": (reliability, 3),
    "cards": (cards, 5),
    "sweep": (sweep, 3),
}


# -- the command -----------------------------------------------------------------------------------------------------


def run_card(
    *, out: Path, minutes: float, start: StageName, device: Device, peers: tuple[str, ...]
) -> int:
    """Run the stages from `start` on, write the JSON after each and the page at the end; return the exit code.

    Raises: ConfigError if there is no usable card, or nothing to continue with; KeyboardInterrupt.
    """
    card = _begin(out, start, device)
    names = list(STAGES)[list(STAGES).index(start) :]
    end = time.monotonic() + 60 * minutes
    for place, name in enumerate(names):
        try:
            with TemporaryDirectory(prefix="gpt2lab-card-", ignore_cleanup_errors=True) as folder:
                bench = _bench(card, peers, Path(folder))
                bench.end = time.monotonic() + _seconds_for(names[place:], end, bench.gpus)
                print(f"{name}: at most {max(0, bench.left):.0f} s", flush=True)
                card["stages"][name] = found = _carried_out(name, bench)
            _write(out, card)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"continue with --from {name}" if place or out.exists() else ""
            ) from None
        print("; ".join([f"{name}: {found['verdict']}", *found["problems"]]), flush=True)
    page = card_page.page(_read(out))
    out.with_suffix(".md").write_text(page)
    print(f"\n{page}")
    print(
        f"written: {out} and {out.with_suffix('.md').name}; docs/cards/README.md says where to send them"
    )
    return int(any(one["verdict"] == "failed" for one in card["stages"].values()))


def _bench(card: dict[str, Any], peers: tuple[str, ...], folder: Path) -> Bench:
    """Return what the next stage works with, as far as the stages before it tell."""
    known = {key: value for stage in card["stages"].values() for key, value in stage.items()}
    gpus = 2 if card["device"] == "cpu" else len(known.get("gpus", []))
    return Bench(card["device"], gpus, known.get("micro_batch", 1), peers, folder, 0.0)


def _seconds_for(names: list[StageName], end: float, gpus: int) -> float:
    """Return the first stage's share of the time until `end`."""
    share = STAGES[names[0]][1]
    shares = sum(STAGES[name][1] for name in names if name != "cards" or gpus > 1)
    left = end - time.monotonic()
    return left * share / max(shares, share) if share else _DOCTOR_SECONDS


def _carried_out(name: StageName, bench: Bench) -> dict[str, Any]:
    """Return what a stage found, with its verdict. Only the doctor's errors end the command."""
    began = time.monotonic()
    try:
        if bench.left < 1 and not (name == "cards" and bench.gpus < 2):  # it skips itself
            raise CheckError("no time is left of --minutes")
        with doing(f"stage {name}"):
            found = STAGES[name][0](bench)
        verdict = "failed" if found["problems"] else "passed"
    except _SkippedError as skipped:
        verdict, found = "skipped", {"problems": [str(skipped)]}
    except Exception as error:
        if name == "doctor":
            raise
        kind = "" if isinstance(error, GPT2LabError) else f"{type(error).__name__}: "
        verdict, found = "failed", {"problems": [f"{kind}{error}"]}
    return {"verdict": verdict, "seconds": time.monotonic() - began} | found


def _begin(out: Path, start: StageName, device: Device) -> dict[str, Any]:
    """Return the card to go on with, without the stages from `start` on; a new one if that is the first.

    Raises: ConfigError.
    """
    if start == "doctor":
        if out.exists():
            raise ConfigError(
                f"--out {out} exists; continue it with --from STAGE, or name another file"
            )
        return {"schema": SCHEMA, "commit": git_commit(), "device": device, "stages": {}}
    card = _read(out)
    earlier = list(STAGES)[: list(STAGES).index(start)]
    missing = [name for name in earlier if name not in card["stages"]]
    fix = "start without --from, with another --out"
    if missing:
        raise ConfigError(f"--from {start}: {out} has no stage {missing[0]}; --from {missing[0]}")
    for name, now in (("commit", git_commit()), ("device", device)):
        if card[name] != now:
            raise ConfigError(f"--from {start}: {out} is of {name} {card[name]}, not {now}; {fix}")
    card["stages"] = {name: card["stages"][name] for name in earlier}
    return card


def _read(out: Path) -> dict[str, Any]:
    """Read a card. Raises: ConfigError."""
    try:
        card: dict[str, Any] = json.loads(out.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--from: there is no {out} to continue; start without --from") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--out {out}: cannot be read ({error}); name another file") from None
    if not isinstance(card, dict) or card.get("schema") != SCHEMA:
        raise ConfigError(f"--out {out} is not a {SCHEMA}; name another file")
    return card


def _write(out: Path, card: dict[str, Any]) -> None:
    """Write the card with its verdicts, without host name, user and paths, and at most `LARGEST` bytes."""
    facts = card["stages"]["doctor"]
    gpus = facts["gpus"]
    card["card"] = gpus[0]["name"] if gpus else facts["processor"]
    card["versions"] = facts["versions"]
    card["predictions"] = card_page.verdicts(card["stages"], card=card["card"])
    public = without_paths(without_names(card))
    text = json.dumps(public, indent=1) + "\n"
    if len(text) > LARGEST:  # of operators, which are many
        for stage in public["stages"].values():
            stage.pop("profile", None)
            stage["problems"] = [problem[:300] for problem in stage["problems"][:20]]
        text = json.dumps(public) + "\n"
    replace_durably(out, text)


def without_paths(facts: Any) -> Any:
    """Return facts with only the last part of every absolute path; addresses stay.

    >>> without_paths({"why": "no /home/me/x.json here, 3 tokens/s / card, see https://a.org/b"})
    {'why': 'no x.json here, 3 tokens/s / card, see https://a.org/b'}
    """
    if isinstance(facts, dict):
        return {key: without_paths(value) for key, value in facts.items()}
    if isinstance(facts, list):
        return [without_paths(value) for value in facts]
    if not isinstance(facts, str):
        return facts
    begin = r"(?:(?<=file://)|(?<=\s-[IL])|(?<![\w.)/]))"  # of a path, not within an address
    return re.sub(begin + r"~?/(?=\w)(?:[^\s/'\"]+/)*", "", facts)
