"""Send metrics.jsonl to experiment trackers: while a run trains, or afterwards. No torch.

The trainer starts a process for each tracker, which follows the file, and closes its standard input at the end. No
error, hang or exit of a library can reach a run; at worst the end of the run waits some seconds. wandb's own service
process does not isolate like this (wandb 0.31): with the service stopped, run.log blocks within 400 calls; with it
killed, run.log raises.
`trackers/NAME.json` in the run's folder holds the id of the tracker's run and how far metrics.jsonl has been sent.
So every start continues the same run, nothing is sent twice, and what an earlier start could not send comes first.
"""

import contextlib
import fcntl
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import IO, Any

from gpt2lab import paths
from gpt2lab.config.settings import to_flat
from gpt2lab.errors import ConfigError, GPT2LabError, InUseError, system_errors_as
from gpt2lab.files import COUNT, NUMBER, STRING, JsonFile, Rule, regular, replace_durably
from gpt2lab.runs.events import METRICS, Event, parse_line
from gpt2lab.tracking.tensorboard import tags_of
from gpt2lab.tracking.trackers import LIBRARIES, MOST_ROWS, Row, is_installed, without_secrets
from gpt2lab.training.extension import Extension, LiveRun

FOLDER = "trackers"
_POLL_SECONDS = 1.0
# Of a run of ours: another would be one of the user's own runs, or a part of a query.
_ID: Rule = (lambda value: bool(re.fullmatch("[0-9a-f]{8}", str(value))), "8 hex digits")
FINISH_SECONDS = 30.0  # the longest wait at the end of a run for the rest to be sent


class TrackerProcess:
    """The trainer's handle on the process that sends one start's events to one tracker."""

    def __init__(self, run_dir: Path, name: str, *, settings: dict[str, Any]) -> None:
        """Start the process.

        Raises: OSError.
        """
        self._label = LIBRARIES[name].label
        self._log = run_dir / FOLDER / f"{name}.log"
        self._log.parent.mkdir(exist_ok=True)
        with open(self._log, "w", opener=regular) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpt2lab.tracking.followers", str(run_dir), name],
                env=paths.child_environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl+C and torchrun's signals are for the trainer
            )
        assert self._process.stdin is not None
        self._input: IO[bytes] = self._process.stdin
        with contextlib.suppress(OSError):  # it has ended already: `problem` tells
            self._input.write(json.dumps(settings).encode() + b"\n")
            self._input.flush()

    def problem(self) -> str | None:
        """Return why the process ended too early, None while it lives."""
        if self._process.poll() is None:
            return None
        self.end()
        said = self._log.read_text(errors="replace").strip().splitlines() or ["no output"]
        return (
            f"no more events go to {self._label}, the run continues: {without_secrets(said[-1])[:200]} "
            f"(all of it in {FOLDER}/{self._log.name})"
        )

    def end(self) -> None:
        """Tell the process that nothing more is written."""
        with contextlib.suppress(OSError):
            self._input.close()

    def wait(self, deadline: float) -> str | None:
        """Wait for the rest to be sent until a moment of the monotonic clock; return the problem if there is one."""
        self.end()
        try:
            code = self._process.wait(max(0.0, deadline - monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return (
                f"{self._label} did not take the rest within {FINISH_SECONDS:.0f} s and was stopped, see "
                f"{FOLDER}/{self._log.name}; gpt2lab runs sync sends what is missing"
            )
        return self.problem() if code else None


class Trackers(Extension):
    """Follows metrics.jsonl with one process for each tracker."""

    def __init__(self) -> None:
        self._processes: list[TrackerProcess] = []

    def started(self, run: LiveRun) -> None:
        """Start the processes, with a warning for one that cannot be used here."""
        self._run = run
        for name in run.start.config.log.trackers:
            try:
                if not is_installed(name):
                    raise OSError(f'it is not installed: pip install "gpt2lab[{name}]"')
                settings = to_flat(run.start.config)
                self._processes.append(TrackerProcess(run.start.run_dir, name, settings=settings))
            except OSError as error:
                print(f"warning: no mirror at {LIBRARIES[name].label}: {error}", file=sys.stderr)

    def recorded(self, event: Mapping[str, Any], result: object) -> None:
        """Say once of each process that has ended too early."""
        for process in list(self._processes):
            if (problem := process.problem()) is not None:
                self._processes.remove(process)
                self._run.logger.warn(problem, event["step"])

    def ended(self, reason: str | None, error: BaseException | None) -> None:
        """Let the processes send the rest, for some seconds."""
        for process in self._processes:
            process.end()
        deadline = monotonic() + FINISH_SECONDS
        for process in self._processes:
            if (problem := process.wait(deadline)) is not None:
                self._run.logger.say(f"warning: {problem}")


def sync(run_dir: Path, name: str, *, settings: dict[str, Any]) -> int:
    """Send what a tracker lacks of a run; return the number of events sent.

    Raises: ConfigError if the library is missing or fails, InUseError if another process sends.
    """
    label = LIBRARIES[name].label
    if not is_installed(name):
        raise ConfigError(
            f'{label} is not installed: pip install "gpt2lab[{name}]"; nothing was sent'
        )
    ended = threading.Event()
    ended.set()
    try:
        return send(run_dir, name, settings=settings, ended=ended)
    except GPT2LabError:
        raise
    except Exception as error:  # of any kind: the library's
        raise ConfigError(f"{label}: {_one_line(error)}") from error


@dataclass
class Sent:
    """What has been sent of a run to a tracker."""

    id: str
    place: str
    rows: int = 0
    begin: int = 0  # first byte, in metrics.jsonl, of the last line sent
    end: int = 0  # the byte after that line
    crc: int = 0  # of that line
    attempt: int = 0  # of its event, 0 in earlier versions' records
    time: float = 0.0  # of its event


def send(run_dir: Path, name: str, *, settings: dict[str, Any], ended: threading.Event) -> int:
    """Send what follows the last line sent, until `ended` is set and all is sent; return the number of rows.

    Raises: InUseError if another process sends; ConfigError; whatever the library raises.
    """
    log = run_dir / METRICS
    with _claimed(run_dir, name) as file:
        tracker = LIBRARIES[name]()
        sent = _read_sent(file, tracker.place(run_dir))
        _find_place(log, sent, file.path)
        before = sent.rows
        if ended.is_set() and next(_unsent(log, sent.end), None) is None:
            return 0
        tracker.init(run_dir, sent.id, settings)
        while True:
            is_last = ended.is_set()  # before reading: then nothing is written after what is read
            lines = _unsent(log, sent.end)
            while batch := list(itertools.islice(lines, MOST_ROWS)):
                rows = []
                for sent.begin, line, event, values in batch:
                    sent.end, sent.crc = sent.begin + len(line), zlib.crc32(line)
                    sent.attempt, sent.time = event["attempt"], event["time"]
                    if values:
                        if event["event"] == "step":
                            values["Training/attempt"] = event["attempt"]
                        rows.append(Row(sent.rows, event["step"], event["time"], values))
                        sent.rows += 1
                if rows:
                    tracker.log(rows)
                with system_errors_as(ConfigError, file.path):
                    replace_durably(file.path, json.dumps(asdict(sent)))
            if is_last:
                break
            ended.wait(_POLL_SECONDS)
        tracker.finish()
        return sent.rows - before


def _unsent(path: Path, begin: int) -> Iterator[tuple[int, bytes, Event, dict[str, float | str]]]:
    """Yield (byte, line, event, values) of the undamaged lines from byte `begin` on.

    An event that a later start or a rewind took back has no values.
    """
    # (byte after its line, step) of each event that takes back everything after that step
    starts: list[tuple[int, int]] = []
    with open(path, "rb", opener=regular) as file:
        file.seek(begin)
        end = begin
        for line in file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            event = None if b'"event": "step"' in line else _event(line)
            if event is not None and event["event"] in ("begin", "resume", "rewind"):
                starts.append((end, event["step"]))
        lowest = list(itertools.accumulate((step for _, step in reversed(starts)), min))[::-1]
        file.seek(begin)
        passed = 0
        while begin < end:
            line = file.readline()
            while passed < len(starts) and starts[passed][0] <= begin + len(line):
                passed += 1
            event = _event(line)
            if event is not None:
                is_back = passed < len(starts) and event["step"] > lowest[passed]
                yield begin, line, event, {} if is_back else tags_of(event)
            begin += len(line)


def _event(line: bytes) -> Event | None:
    try:
        return parse_line(line)
    except ValueError:
        return None


@contextlib.contextmanager
def _claimed(run_dir: Path, name: str) -> Iterator[JsonFile]:
    """Yield the record of what has been sent to a tracker; no other process uses it meanwhile."""
    folder = run_dir / FOLDER
    with system_errors_as(ConfigError, folder):
        folder.mkdir(exist_ok=True)
        lock = open(folder / f"{name}.lock", "w", opener=regular)  # noqa: SIM115
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InUseError(
                f"{run_dir}: another process sends it to {LIBRARIES[name].label} now, perhaps the trainer; "
                f"wait until that has ended"
            ) from None
        yield JsonFile(folder / f"{name}.json", ConfigError)


def _read_sent(file: JsonFile, place: str) -> Sent:
    if file.path.exists():
        values = file.read()
        numbers = dict.fromkeys(("rows", "begin", "end", "crc"), COUNT)
        rules, later = {"id": _ID, "place": STRING, **numbers}, {"attempt": COUNT, "time": NUMBER}
        file.check(values, rules, later)
        if values["place"] == place:
            return Sent(**{name: values[name] for name in (*rules, *later) if name in values})
    return Sent(uuid.uuid4().hex[:8], place)


def _find_place(log: Path, sent: Sent, record: Path) -> None:
    """Find the last line sent: damaged lines before it may have been removed since.

    A power cut may have taken it: the record is on the disk at once, the log at each checkpoint. Then what is later
    than its event is unsent.
    """
    if not sent.end:
        return
    with open(log, "rb", opener=regular) as file:
        file.seek(sent.begin)
        if zlib.crc32(file.read(sent.end - sent.begin)) == sent.crc:
            return
        file.seek(0)
        begin = 0
        for line in file:
            if zlib.crc32(line) == sent.crc:
                sent.begin, sent.end = begin, begin + len(line)
                return
            begin += len(line)
    if not sent.attempt:
        raise ConfigError(f"{log}: has lost the line sent last; delete {record} to send all again")
    sent.end = 0
    for begin, line, event, _ in _unsent(log, 0):
        if event["attempt"] <= sent.attempt and event["time"] <= sent.time:
            sent.end = begin + len(line)


def _one_line(error: Exception) -> str:
    said = (str(error).strip().splitlines() or [""])[0]
    return without_secrets(f"{type(error).__name__}: {said}")


def _follow(run_dir: Path, name: str) -> int:
    settings = json.loads(sys.stdin.readline())
    ended = threading.Event()

    def wait_for_the_end() -> None:
        os.read(0, 1)  # not sys.stdin: an interpreter that ends while its lock is held aborts
        ended.set()
        time.sleep(2 * FINISH_SECONDS)  # the trainer was killed, or it would have ended this
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    give_up = monotonic() + 2 * FINISH_SECONDS
    while True:
        try:
            send(run_dir, name, settings=settings, ended=ended)
            return 0
        except InUseError:  # the process of the start before has not ended yet
            if monotonic() > give_up or ended.is_set():
                raise
            time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    try:
        sys.exit(_follow(Path(sys.argv[1]), sys.argv[2]))
    except Exception as error:
        print(without_secrets(traceback.format_exc()), file=sys.stderr)
        print(_one_line(error), file=sys.stderr)
        sys.exit(1)
