"""Asked to stop: signals counted in a process of its own, moments read, files taken up."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from unittest.mock import Mock

import pytest

import launch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import ConfigError, DataError
from gpt2lab.training import stop
from gpt2lab.training.control import Agreement, Control
from gpt2lab.training.heartbeat import FOLDER, Heartbeat
from gpt2lab.training.stop import Signals, find_due, launcher_grace_seconds, parse_moment

NOW = datetime(2026, 11, 21, 18, 0, tzinfo=timezone(timedelta(hours=1)))


def ends_as(code: str) -> launch.Done:
    """Run code in a process of its own: these signals, and a hang, end processes."""
    head = "import os, signal, time\nfrom gpt2lab.training.stop import Signals\nme = os.getpid()\ns = Signals()\n"
    return launch.python("-c", head + code)


def test_the_third_signal_ends_a_process_that_runs_no_python_code():
    """As one that waits in a collective: a mutex locked twice holds the main thread in C, whatever arrives."""
    code = (
        "import ctypes, threading\n"
        "def press():\n"
        "    for _ in range(3): time.sleep(0.3); os.kill(me, signal.SIGTERM)\n"
        "threading.Thread(target=press).start()\n"
        "lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)\n"
        "lock(mutex); lock(mutex); print('alive')"
    )
    assert ends_as(code).returncode == 128 + signal.SIGTERM


def test_signals_are_counted_by_what_they_ask_for_and_a_burst_is_one_wish():
    """The kernel sends one for every thread of a launcher that dies; three of them once ended workers unsaved."""
    code = "os.kill(me, signal.SIGUSR1); time.sleep(0.2); print(s.level, s.wants_save)\n"
    code += "for _ in range(5): os.kill(me, signal.SIGHUP); time.sleep(0.02)\n"
    done = ends_as(f"{code}time.sleep(0.2); print(s.level, s.number)")
    assert (done.returncode, done.stdout) == (0, f"0 True\n1 {int(signal.SIGHUP)}\n")
    nohup = "s.close(); signal.signal(signal.SIGHUP, signal.SIG_IGN); s = Signals()\n"
    assert ends_as(f"{nohup}{code}print(s.level)").stdout == "0 True\n0\n", "as after nohup"


@pytest.mark.parametrize("committer", ["this process", "its writer"])
def test_the_third_signal_lets_a_commit_end(committer):
    begin = "s.committing()" if committer == "this process" else "writing()"
    code = (
        "import contextlib\n@contextlib.contextmanager\n"
        "def writing():\n    s.is_writing = lambda: True\n    yield\n    s.is_writing = lambda: False\n"
        f"with {begin}:\n"
        "    for _ in range(3): os.kill(me, signal.SIGINT); time.sleep(0.3)\n"
        "    time.sleep(0.5); print('committed', flush=True)\n"
        "time.sleep(5); print('alive')"
    )
    done = ends_as(code)
    assert (done.returncode, done.stdout) == (128 + signal.SIGINT, "committed\n")


def test_a_phase_is_judged_by_its_own_limit_though_it_ends_meanwhile(tmp_path):
    """Its state is written to a disk that may be slow; the next phase's limit once ended a run that went well."""
    code = (
        "from pathlib import Path\nfrom gpt2lab.training.heartbeat import Heartbeat\n"
        f"beats = Heartbeat(Path({str(tmp_path)!r}), rank=0, world_size=1, hang_seconds=0.4)\n"
        "beats.enter('agreeing', 1); beats.enter('training', 1)\n"  # for the first time: thrice as long
        "write = beats._write\n"
        "def write_slowly(*told):\n"
        "    write(*told)\n"
        "    if told[-1] > 0.6: beats.enter('agreeing', 2)\n"
        "beats._write = write_slowly\n"
        "time.sleep(1.0); beats.close(); print('alive')"
    )
    done = ends_as(code)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


@pytest.mark.slow
def test_a_stopped_process_has_not_hung_and_still_sees_a_hang(tmp_path):
    """Ctrl+Z and fg once ended a healthy run; nor may the pause become what a phase is allowed to last."""
    code = (
        "import subprocess\nfrom pathlib import Path\nfrom gpt2lab.training.heartbeat import Heartbeat\n"
        f"beats = Heartbeat(Path({str(tmp_path)!r}), rank=0, world_size=1, hang_seconds=0.8)\n"
        "beats.enter('training', 1); beats.enter('agreeing', 2); beats.enter('training', 2)\n"
        "fg = subprocess.Popen(['sh', '-c', f'sleep 3; kill -CONT {me}'])\n"
        "time.sleep(0.1); os.kill(me, signal.SIGSTOP)\n"
        "for _ in range(20): time.sleep(0.01)\n"  # more beats of the watch
        "fg.wait(); beats.enter('agreeing', 3)\n"
        "print('alive', beats.limit_seconds('training') < 20, flush=True)\n"
        "beats._longest.clear(); beats.enter('saving', 3); time.sleep(60)"
    )
    done = ends_as(code)
    assert (done.returncode, done.stdout) == (78, "alive True\n"), done.stderr
    assert "hangs in saving of step 3" in done.stderr


def test_a_hang_blames_no_rank_of_an_earlier_start_and_reads_no_damaged_file(tmp_path):
    """Rank 7 was killed when the run had eight; that rank is long gone when one of two hangs."""
    folder = tmp_path / FOLDER
    folder.mkdir()
    beat = {"rank": 0, "host": "a", "step": 5, "phase": "saving", "seconds": 9, "time": 1e12}
    (folder / "rank_0000.json").write_text(json.dumps(beat))
    (folder / "rank_0001.json").write_text(json.dumps({**beat, "rank": 1, "step": 6}))  # waits
    (folder / "rank_0007.json").write_text(json.dumps({**beat, "rank": 7, "step": 1, "time": 0}))
    report = Heartbeat(tmp_path, rank=0, world_size=2, hang_seconds=0).report()
    assert "all wait for: rank 0 on a saving of step 5 for 9 s;" in report
    assert "rank 7" not in report
    for damaged in ("[]", "{", json.dumps({**beat, "time": "now"})):
        (folder / "rank_0001.json").write_text(damaged)
        assert Heartbeat(tmp_path, rank=0, world_size=2, hang_seconds=0).report() == report


@pytest.fixture
def central_europe(monkeypatch) -> Iterator[None]:
    """Set this process's clock to a zone that has summer time."""
    with monkeypatch.context() as zone:
        zone.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("central_europe")
def test_moments_are_the_next_clock_time_or_an_iso_date():
    for text, expected in {
        "18:30": NOW.replace(hour=18, minute=30),
        "18:00": NOW + timedelta(days=1),
        "2026-11-22T07:00": NOW.replace(day=22, hour=7),
        "2026-11-21T18:00Z": NOW.replace(hour=19),
    }.items():
        assert parse_moment(text, now=NOW) == expected, text
    # Those that are none or have passed are rejected.
    for text in ("25:00", "soon", "2026-11-21T17:59", "2026-13-01", "0001-01-01T00:00"):
        with pytest.raises(ConfigError, match="stop_at"):
            parse_moment(text, now=NOW)


@pytest.mark.usefixtures("central_europe")
@pytest.mark.parametrize(
    ("text", "begun", "hour"),
    [
        ("2026-10-25T18:30", datetime(2026, 10, 24, 12, 0), 17),  # summer time ends on the 25th
        ("11:30", datetime(2026, 10, 24, 12, 0), 10),
        ("2026-03-29T18:30", datetime(2026, 3, 28, 12, 0), 16),  # and begins on the 29th
    ],
)
def test_a_moment_beyond_a_change_of_the_clocks_is_what_they_will_show(text, begun, hour):
    moment = parse_moment(text, now=begun.astimezone()).astimezone(timezone.utc)
    assert (moment.day, moment.hour, moment.minute) == (begun.day + 1, hour, 30)


def test_the_schedulers_end_is_a_deadline_and_the_launchers_grace_is_known(monkeypatch):
    now = datetime.now().astimezone().replace(microsecond=0)  # the environment holds whole seconds
    monkeypatch.setattr(time, "monotonic", lambda: 5000.0)
    environ = {"SLURM_JOB_END_TIME": str(int(now.timestamp()) + 100)}
    deadlines = stop.find_deadlines(None, environ, now=now, max_hours=0.5)
    assert deadlines == {"SLURM_JOB_END_TIME": 5100.0, "max_hours": 6800.0}
    assert find_due(deadlines, margin_seconds=10) is None
    assert find_due(deadlines, margin_seconds=200) == "SLURM_JOB_END_TIME"
    assert stop.find_deadlines(None, {"SLURM_JOB_END_TIME": ""}, now=now) == {}
    assert launcher_grace_seconds({}) is None
    assert launcher_grace_seconds({"TORCHELASTIC_RUN_ID": "x"}) == 30
    typed = {"TORCHELASTIC_RUN_ID": "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}
    assert launcher_grace_seconds(typed) == 7


@pytest.fixture
def signals():
    """Return signals; closing them gives those of this process back."""
    before = signal.getsignal(signal.SIGTERM)
    signals = Signals()
    assert signal.getsignal(signal.SIGTERM) is not before
    yield signals
    signals.close()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.set_wakeup_fd(-1) == -1


def control(signals: Signals, run_dir: Path, every: float = 0.0, **deadlines: float) -> Control:
    beats = Heartbeat(run_dir, rank=0, world_size=1, hang_seconds=0)
    how = {"run_dir": run_dir, "deadlines": deadlines, "heartbeat": beats}
    made = Control(signals, Runtime(), save_every_seconds=every, **how)
    made._last_look -= 10
    return made


def test_a_wish_to_save_stands_until_it_is_met_and_minutes_ask_for_one(signals, tmp_path):
    (tmp_path / "SAVE").touch()
    asked = control(signals, tmp_path)
    assert asked.agree() == Agreement(save=True)
    assert asked.agree() == Agreement(save=True), "an evaluation may have asked first"
    asked.note_save()
    assert asked.agree() == Agreement()
    asked = control(signals, tmp_path, every=600.0)
    assert not asked.agree().save
    asked._last_save -= 600
    assert asked.agree().save
    asked.note_save()
    assert not asked.agree().save


def test_a_deadline_is_met_before_it_by_what_a_stop_takes(signals, tmp_path):
    asked = control(signals, tmp_path, stop_at=time.monotonic() + 60)
    assert asked.agree().stop is None
    asked.own_reason = "no longer improves"
    assert (asked.agree().stop, asked.is_interrupted()) == (asked.own_reason, False)
    asked.margin_seconds = 61
    assert (asked.agree().stop, asked.is_interrupted()) == ("stop_at", True)


def test_a_rejection_of_one_is_everyones(signals, tmp_path):
    rejection = DataError("shard 3 is gone")
    rejection.is_local = True
    request = control(signals, tmp_path).agree(rejection)
    assert request.error is rejection
    assert not rejection.is_local
    rejection.is_local = True
    with pytest.raises(DataError) as error:
        Runtime().on_all_ranks(Mock(side_effect=rejection))
    assert not error.value.is_local


@pytest.mark.parametrize(
    ("number", "ends"),
    [
        (signal.SIGINT, ["; press twice more to abort", "; press once more to abort"]),
        (signal.SIGTERM, ["", ""]),
    ],
)
def test_a_request_to_stop_is_answered_beside_the_main_thread(signals, monkeypatch, number, ends):
    """The main thread may wait in a collective, and the one that listens must hear the next signal."""
    monkeypatch.setattr(stop, "SAME_REQUEST_SECONDS", 0.0)
    heard, answers = threading.Event(), []

    def answer(number: int, level: int) -> None:
        answers.append((threading.current_thread().name, stop.more_to_abort(number, level)))
        heard.set()
        raise RuntimeError("of a closed terminal, say")

    signals.answer = answer
    for _ in range(2):
        heard.clear()
        os.kill(os.getpid(), number)
        assert heard.wait(timeout=100)
    assert answers == [("answer", end) for end in ends]
