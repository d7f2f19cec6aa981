"""What a person sees of a run: a line that rewrites itself on a terminal, plain lines in a file, beats of long work."""

import contextlib
import fcntl
import functools
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator

import pytest

from gpt2lab.commands import entry
from gpt2lab.runs import console
from gpt2lab.runs.console import Console, Task, finish_stderr, never_wait_for_stderr, wrap
from gpt2lab.runs.logger import MetricsLogger
from launch import HANG_SECONDS, REPOSITORY, TRAIN
from whole_run import Run


def on_terminal(command: list[str], *, columns: int) -> str:
    """Run a program on a terminal of its own and return all that it wrote there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while part := os.read(ours, 65536):
            written += part
    os.close(ours)
    assert process.wait() == 0, written.decode()
    return written.decode().replace("\r\n", "\n")


def test_a_quiet_command_says_what_it_does_and_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(console, "BEAT_SECONDS", 0.0)
    monkeypatch.setattr(entry, "_LOOK_SECONDS", 0.001)

    def hear(pattern: str) -> None:
        said, deadline = "", time.monotonic() + HANG_SECONDS
        while not re.search(pattern, said, re.MULTILINE):
            assert time.monotonic() < deadline, said
            said = capsys.readouterr().err

    with entry.never_silent():
        hear(r"^working: \d+ s so far$")
        with console.doing("evaluating"):
            hear(r"^evaluating: \d+ s so far$")
            for number in console.counted(range(3), "batches"):
                hear(rf"^evaluating: {number} of 3 batches, .* left$" if number else "^evaluating")
            for _ in console.counted(iter("ab"), "tokens", 1_000):
                pass
            hear(r"^evaluating: 1 of 1,000 tokens, .* left$")
        with console.doing(""), console.doing("nothing that anybody hears"):
            time.sleep(0.05)
    assert "anybody" not in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    with entry.never_silent():
        assert "beats" not in {thread.name for thread in threading.enumerate()}


def test_on_a_terminal_it_is_one_line_that_goes_when_something_is_printed():
    program = "import time; from gpt2lab.commands import entry; from gpt2lab.runs import console; "
    program += "console.BEAT_SECONDS = 0.0; "
    program += "entry.run(lambda argv: time.sleep(1.7) or print('done') or 0)"
    shown = on_terminal([sys.executable, "-c", program], columns=80)
    *_, last = shown.split("\n")[:-1]
    assert re.search(r"\rworking: 1 s so far", shown)
    assert (shown.count("\n"), last.rpartition("\r")[2]) == (1, "done")


def test_long_work_is_plain_lines_in_a_file_and_rarer_in_the_log(tmp_path, monkeypatch, capsys):
    @contextlib.contextmanager
    def for_a_minute(tell: object) -> Iterator[None]:
        assert callable(tell)
        for seconds in range(4, 61, 4):
            tell(float(seconds))
        yield

    monkeypatch.setattr("gpt2lab.runs.logger.beats", for_a_minute)
    logger = MetricsLogger(tmp_path, attempt=1)
    with logger.waiting("compiling the step, about 40s"):
        logger.show("only for a terminal")
    logger.say("compiled")
    logger.close()
    assert Task("loss", 30, 120, "batches").line(10.0) == "loss: 30 of 120 batches, 30s left"
    what = "compiling the step, about 40s"
    shown, log = (
        [what, *(f"{what}: {seconds} s so far" for seconds in told), "compiled"]
        for told in (range(4, 61, 4), (4, 8, 16, 32))
    )
    assert capsys.readouterr().out.splitlines() == shown
    assert (tmp_path / "log.txt").read_text().splitlines() == log


class Pipe:
    """A pipe in place of standard output, with a reader that stops and goes on."""

    def __init__(self) -> None:
        self.reading, writing = os.pipe()
        self._filler = os.open(f"/proc/self/fd/{writing}", os.O_WRONLY | os.O_NONBLOCK)
        self.file = open(writing, "w")  # noqa: SIM115
        os.set_blocking(self.reading, False)

    def fill(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.write(self._filler, b"x" * 4096):
                pass

    def read(self) -> str:
        parts = []
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.reading, 65536):
                parts.append(part)
        return b"".join(parts).decode().lstrip("x")

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.file.close()
        for end in (self.reading, self._filler):
            os.close(end)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_slow_reader_gets_every_line_and_no_line_waits_for_it(stream, pipe, monkeypatch):
    """Nor is a line torn that is longer than what the pipe takes at once."""
    monkeypatch.setattr(f"sys.{stream}", pipe.file)
    if stream == "stdout":
        say, finish = (console := Console()).print, console.close
    else:
        never_wait_for_stderr()
        say, finish = functools.partial(print, file=sys.stderr, flush=True), finish_stderr
    lines = [f"{number} " + "y" * 3000 for number in range(60)]
    pipe.fill()
    for line in lines:
        say(line)  # would never return if it waited
    taken = pipe.read()
    say("after")
    taken += pipe.read()
    reader = threading.Timer(0.3, lambda: found.append(pipe.read()))
    found: list[str] = []
    reader.start()
    finish()
    reader.join()
    assert (taken + found[0] + pipe.read()).splitlines() == [*lines, "after"]


def test_lines_that_find_no_room_are_counted(pipe, monkeypatch):
    monkeypatch.setattr("gpt2lab.runs.console._CAPACITY", 10)
    monkeypatch.setattr("sys.stdout", pipe.file)
    console = Console()
    pipe.fill()
    for line in ("waits", "finds no room", "nor this\nnor that"):
        console.print(line)
    assert pipe.read() == ""
    console.print("after")
    missing = "(lines that are in log.txt only: 3; reader too slow)"
    assert pipe.read().splitlines() == ["waits", missing, "after"]


def test_nothing_fails_for_want_of_a_reader_of_stderr(pipe, monkeypatch):
    monkeypatch.setattr("sys.stderr", pipe.file)
    never_wait_for_stderr()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), pipe.reading)  # closes the pipe's end
    print("warning", file=sys.stderr)
    finish_stderr()


def test_wrapping_leaves_commands_whole():
    text = "data           " + "word " * 30
    assert max(map(len, wrap(text, 80).splitlines())) <= 80
    assert wrap(text, 80).split() == text.split()
    command = "  go on  python src/train.py --run_name r --resume latest " + "--x y " * 20
    assert wrap(command, 80) == command


def test_a_run_on_a_terminal_of_80_columns_fits_and_rewrites_its_progress(tiny_data, tmp_path):
    flags = [*Run(tiny_data, tmp_path).flags, "--max_steps=6", "--log_freq=4"]
    shown = on_terminal([sys.executable, str(TRAIN), *flags], columns=80)
    lines = [line.rsplit("\r", 1)[-1] for line in shown.split("\n")]  # what stays
    wide = [line for line in lines if len(line) > 80 and " --" not in line]
    assert [line for line in wide if " " in line.strip()] == []  # a long word is a path
    stay = [int(found[1]) for line in lines if (found := re.match(r"step (\d+)/6 \| loss", line))]
    assert stay == [1, 4, 6]
    rewritten = re.findall(r"\rstep (\d+)/6 \| loss", shown)
    assert [int(step) for step in rewritten] == [1, 1, 2, 3, 4, 4, 5, 6, 6]  # some stay, too
    assert ("\rstep 0/6 | evaluating 320 tokens" in shown, "mfu" in shown) == (True, False)
    assert "deterministic" not in shown
    log = (tmp_path / "tiny" / "log.txt").read_text().splitlines()
    assert any(re.match(r"step 4/6 \| epoch 0 \| .* \| norm .* \| dt ", line) for line in log)
    assert not any("\r" in line for line in log)


@pytest.mark.parametrize(
    ("step_seconds", "young", "old"),  # lines of the first ten minutes, and of ten later ones
    [(0.01, 120, 20), (0.9, 133, 20), (1.6, 125, 21), (6.0, 99, 20), (60.0, 9, 10)],
)
def test_in_a_file_steps_break_silence(tmp_path, monkeypatch, capsys, *, step_seconds, young, old):
    now = 0.0
    monkeypatch.setattr("gpt2lab.runs.logger.monotonic", lambda: now)
    logger = MetricsLogger(tmp_path, attempt=1)
    told = []
    for end in (600.0, 1200.0):
        while now + step_seconds < end:
            now += step_seconds
            logger.log_if_quiet(f"at {now}", step_seconds=step_seconds)
        told.append(capsys.readouterr().out.count("\n"))
    logger.close()
    assert told == [pytest.approx(young, abs=1), pytest.approx(old, abs=1)]


def test_a_run_in_a_file_tells_of_steps_between_those_of_log_freq(run, monkeypatch, capsys):
    now = itertools.count(step=20.0)  # seconds between two looks at the clock
    monkeypatch.setattr("gpt2lab.runs.logger.monotonic", lambda: next(now))
    run.train("--max_steps=6", "--log_freq=100")
    told = re.findall(r"^step (\d)/6 \| .*tok/s", capsys.readouterr().out, flags=re.MULTILINE)
    assert {"1", "6"} < set(told) <= set("123456")
    assert len(told) == len(set(told))


ENDS_WITH_AN_ERROR = """
import sys
from pathlib import Path
from gpt2lab.runs.logger import MetricsLogger
logger = MetricsLogger(Path(sys.argv[1]), attempt=1)
logger.show("step 7/10 | loss 3.1")
logger.close()
print("error: out of memory", file=sys.stderr)
"""


def test_an_error_on_a_terminal_begins_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    shown = on_terminal([sys.executable, "-c", ENDS_WITH_AN_ERROR, str(tmp_path)], columns=80)
    line = shown.rstrip("\n").split("\n")[-1]
    before, _, left = line.rpartition("\r")
    assert (before.rpartition("\r")[2].strip(), left) == ("", "error: out of memory")
