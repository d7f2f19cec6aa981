"""`--track`: what a tracker gets, once, from which start, and that no way in which it can fail touches a run."""

import fcntl
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

import launch
from ecosystem import works_with
from gpt2lab.config.schema import TRACKERS
from gpt2lab.config.settings import find_problems
from gpt2lab.errors import ConfigError, InUseError
from gpt2lab.tracking import followers as tracking
from gpt2lab.tracking.trackers import LIBRARIES, Row, WandB, without_secrets
from tiny import TEXT, edit_json, parse, pretrain
from whole_run import SCALARS

CLOCK = itertools.count(10**9)  # of the events
Plain = tuple[list[str], Path]
# What a stand-in for the library does; `{}` is the file that it writes down what it was asked in.
RECORDS = """
import json
class Run:
    def define_metric(self, *a, **k): pass
    def log(self, values, step):
        self.file.write(json.dumps({"row": step, **values}) + chr(10)); self.file.flush()
    def finish(self): self.file.write(json.dumps("finished") + chr(10)); self.file.close()
def init(**options):
    run = Run()
    run.file = open({!r}, "w")
    run.file.write(json.dumps(options) + chr(10))
    return run
"""
FAILS = {
    "raises when it is imported": "raise RuntimeError('no good')",
    "raises at its start": "def init(**_): raise RuntimeError('no good')",
    "ends its process": "import os, sys\ndef init(**_): print('no good', flush=True); os._exit(3)",
    "raises in the middle": f"{RECORDS}def log(*_, **__): raise RuntimeError('no good')\nRun.log = log",
    "raises at its end": f"{RECORDS}def end(self): raise RuntimeError('no good')\nRun.finish = end",
}
HANGS = {
    "hangs when it is imported": "import time; time.sleep(600)",
    "hangs and hears no signal": (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "def init(**_): time.sleep(600)"
    ),
    "hangs at its end": RECORDS + "import time\nRun.finish = lambda self: time.sleep(600)",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, tiny_data) -> Plain:
    """Return flags and the folder of a run without the mirror."""
    runs = tmp_path_factory.mktemp("runs")
    flags = [*TEXT, f"--data_dir={tiny_data}", "--max_steps=4", "--eval_freq=2"]
    flags += ["--sample_freq=2", "--sample_tokens=2"]
    pretrain(parse([*flags, f"--checkpoint_dir={runs}", "--run_name=r"]))
    return flags, runs / "r"


def train(
    plain: Plain, tmp_path: Path, stand_in: str, patch: pytest.MonkeyPatch, patience: float = 60.0
) -> Path:
    """Train with a stand-in for the library and return the run's folder."""
    (tmp_path / "wandb.py").write_text(stand_in.replace("{!r}", repr(str(tmp_path / "said"))))
    patch.setenv("PYTHONPATH", str(tmp_path))
    patch.setattr(tracking, "is_installed", lambda name: True)
    patch.setattr(tracking, "FINISH_SECONDS", patience)
    pretrain(parse([*plain[0], f"--checkpoint_dir={tmp_path}", "--run_name=r", "--track=wandb"]))
    return tmp_path / "r"


def assert_untouched(run_dir: Path, plain: Plain) -> None:
    assert launch.losses(run_dir) == launch.losses(plain[1])
    assert launch.parameter_hash(run_dir, 4) == launch.parameter_hash(plain[1], 4)
    assert json.loads((run_dir / "status.json").read_text())["state"] == "completed"


def test_the_mirror_shows_what_tensorboard_shows(plain, tmp_path, monkeypatch):
    run_dir = train(plain, tmp_path, RECORDS, monkeypatch)
    options, *logged, end = map(json.loads, (tmp_path / "said").read_text().splitlines())
    assert (options["name"], end) == ("r", "finished")
    assert options["id"] == json.loads((run_dir / "trackers" / "wandb.json").read_text())["id"]
    assert [line["row"] for line in logged] == list(range(len(logged)))  # W&B drops lower ones
    assert [line["Training/attempt"] for line in logged if "Training/attempt" in line] == [1] * 4
    assert options["config"]["n_embd"] == 16
    for tag, (kind, field, factor) in SCALARS.items():
        found = [e for e in launch.events(run_dir, kind) if e[field] is not None]
        expected = {event["step"]: event[field] * factor for event in found}
        assert {line["training_step"]: line[tag] for line in logged if tag in line} == expected
    texts = [line["Generated_Samples/text"] for line in logged if "Generated_Samples/text" in line]
    assert texts == [event["text"] for event in launch.events(run_dir, "sample")]
    assert_untouched(run_dir, plain)
    assert "wandb" not in json.dumps(launch.events(run_dir, "warning"))


@pytest.mark.parametrize("way", FAILS)
def test_a_failing_mirror_is_said_and_touches_nothing(plain, tmp_path, monkeypatch, capsys, way):
    run_dir = train(plain, tmp_path, FAILS[way], monkeypatch)
    assert_untouched(run_dir, plain)
    said = [line for line in capsys.readouterr().out.splitlines() if "W&B" in line]
    assert len(said) == 1, said
    assert "no good" in said[0]
    assert said[0] in (run_dir / "log.txt").read_text()


@pytest.mark.parametrize("way", launch.slow(*HANGS))
def test_a_hanging_mirror_is_left_behind_and_ends(plain, tmp_path, monkeypatch, capsys, way):
    began, start = [], tracking.TrackerProcess.__init__
    monkeypatch.setattr(
        tracking.TrackerProcess, "__init__", lambda s, *a, **k: began.append(s) or start(s, *a, **k)
    )
    run_dir = train(plain, tmp_path, HANGS[way], monkeypatch, patience=3.0)
    assert_untouched(run_dir, plain)
    assert "W&B did not take the rest within 3 s" in capsys.readouterr().out
    (tracker,) = began
    with pytest.raises(ProcessLookupError):
        os.kill(tracker._process.pid, 0)


def test_a_missing_library_is_said_and_the_run_goes_on(plain, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tracking, "is_installed", lambda name: False)
    pretrain(parse([*plain[0], f"--checkpoint_dir={tmp_path}", "--run_name=r", "--use_wandb"]))
    said = 'warning: no mirror at W&B: it is not installed: pip install "gpt2lab[wandb]"'
    assert said in capsys.readouterr().err
    assert_untouched(tmp_path / "r", plain)


class Recorder:
    """A tracker that keeps in memory what it is sent."""

    label = "trackio"
    runs: list[str]
    rows: list[Row]

    def place(self, run_dir: Path) -> str:
        return Recorder.where

    def init(self, folder: Path, id: str, settings: dict[str, object]) -> None:
        Recorder.runs.append(id)

    def log(self, rows: Sequence[Row]) -> None:
        Recorder.rows += rows

    def finish(self) -> None:
        pass


@pytest.fixture
def recorder(monkeypatch) -> type[Recorder]:
    Recorder.runs, Recorder.rows, Recorder.where = [], [], "here"
    monkeypatch.setitem(LIBRARIES, "trackio", Recorder)
    return Recorder


def write_log(run_dir: Path, *events: tuple[str, int, int]) -> None:
    """Append (kind, attempt, step) to the log of a run; the loss tells both numbers."""
    with open(run_dir / "metrics.jsonl", "a") as file:
        for kind, attempt, step in events:
            fields = dict.fromkeys(("max_steps", "world_size", "spike_step", "val_loss"), 9)
            fields |= {"event": kind, "time": next(CLOCK), "attempt": attempt, "step": step}
            file.write(json.dumps(fields | {"loss": attempt + step / 1000, "message": ""}) + "\n")


def sync(run_dir: Path) -> int:
    return tracking.sync(run_dir, "trackio", settings={})


def sent(recorder: type[Recorder]) -> list[tuple[int, int]]:
    """Return (attempt, step) of what was sent since the last call."""
    rows = [(int(row.values["Training/attempt"]), row.step) for row in recorder.rows]
    recorder.rows = []
    return rows


def test_a_sync_sends_the_highest_attempt_of_each_step_once(recorder, tmp_path):
    write_log(tmp_path, ("begin", 1, 0), *(("step", 1, n) for n in (1, 2, 3, 4)))
    write_log(tmp_path, ("resume", 2, 2), ("step", 2, 3), ("rewind", 2, 1), ("step", 2, 2))
    assert (sync(tmp_path), sent(recorder)) == (2, [(1, 1), (2, 2)])
    assert sync(tmp_path) == 0
    write_log(tmp_path, ("step", 2, 3))  # the run goes on
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"event": "step", "time": 1.0, "attempt": 2, "st')  # and writes just now
    assert (sync(tmp_path), sent(recorder)) == (1, [(2, 3)])
    assert len(recorder.runs) == 2  # the sync that had nothing to send did not open the library
    assert len(set(recorder.runs)) == 1


def test_what_was_sent_before_a_resume_is_sent_again_only_from_its_step(recorder, tmp_path):
    write_log(tmp_path, ("begin", 1, 0), ("step", 1, 1), ("step", 1, 2), ("step", 1, 3))
    sync(tmp_path)
    write_log(tmp_path, ("begin", 2, 1), ("step", 2, 2), ("step", 2, 3))
    assert (sync(tmp_path), [row.number for row in recorder.rows]) == (2, [0, 1, 2, 3, 4])
    assert sent(recorder) == [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3)]


def test_a_log_that_was_repaired_or_lost_its_end_is_continued_where_it_was(recorder, tmp_path):
    log, record = tmp_path / "metrics.jsonl", tmp_path / "trackers" / "trackio.json"
    log.write_text('{"damaged\n')
    write_log(tmp_path, ("begin", 1, 0), ("step", 1, 1), ("step", 1, 2))
    log.write_text(log.read_text() + '{"damaged\n')
    assert sync(tmp_path) == 2
    log.write_text(log.read_text().replace('{"damaged\n', ""))
    write_log(tmp_path, ("step", 1, 3))
    assert (sync(tmp_path), sent(recorder)) == (1, [(1, 1), (1, 2), (1, 3)])
    left = "".join(log.read_text().splitlines(keepends=True)[:2])  # by a power cut
    for steps in ((2, 3), (2, 3, 4)):  # the second cut leaves nothing of the second start
        log.write_text(left)
        assert sync(tmp_path) == 0
        write_log(tmp_path, ("begin", 2, 1), *(("step", 2, step) for step in steps))
        sync(tmp_path)
        assert sent(recorder) == [(2, step) for step in steps]
    write_log(tmp_path, ("begin", 3, 4), ("step", 3, 5))
    assert (sync(tmp_path), sent(recorder)) == (1, [(3, 5)])
    begun, *lines, _ = log.read_text().splitlines(keepends=True)
    log.write_text(begun.replace('"time": ', '"time": 9') + "".join(lines))  # its clock was ahead
    assert sync(tmp_path) == 0
    log.write_text(left)  # the next start has a lower number than the one sent last
    write_log(tmp_path, ("begin", 2, 1), ("step", 2, 2))
    assert (sync(tmp_path), sent(recorder)) == (1, [(2, 2)])
    assert len(set(recorder.runs)) == 1
    log.write_text(left)
    record.write_text(record.read_text().partition(', "attempt"')[0] + "}")  # of an earlier version
    with pytest.raises(ConfigError, match=r"has lost the line sent last; delete .*trackio\.json"):
        sync(tmp_path)


def test_one_process_sends_to_each_place_and_to_runs_of_this_project_alone(recorder, tmp_path):
    """The id of a downloaded run would be one of the user's own runs, or a part of MLflow's query."""
    write_log(tmp_path, ("begin", 1, 0), ("step", 1, 1))
    lock = tmp_path / "trackers" / "trackio.lock"
    lock.mkdir(parents=True)
    with pytest.raises(ConfigError, match=rf"^{lock.parent}: a folder, not a file; remove it"):
        sync(tmp_path)
    lock.rmdir()
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InUseError, match="another process sends it to trackio now"):
            sync(tmp_path)
    for recorder.where in ("here", "there"):  # each gets everything
        assert sync(tmp_path) == 1
    assert len(set(recorder.runs)) == 2
    edit_json(tmp_path / "trackers" / "trackio.json", id="x' OR tags.y = 'z")
    with pytest.raises(ConfigError):
        sync(tmp_path)


def test_a_library_that_fails_gets_later_what_it_did_not_take(recorder, tmp_path, monkeypatch):
    write_log(tmp_path, ("begin", 1, 0), *(("step", 1, n) for n in range(1, 121)))

    def fail(self: Recorder, rows: Sequence[Row]) -> None:
        if rows[0].step > 1:
            raise OSError("no route to http://me:hunter22@host\nmore")
        recorder.rows += rows

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "log", fail)
        said = r"^trackio: OSError: no route to http://\*\*\*@host$"
        with pytest.raises(ConfigError, match=said):
            sync(tmp_path)
    assert 0 < sync(tmp_path) < 120
    assert [row.step for row in recorder.rows] == list(range(1, 121))


def test_secrets_are_taken_out_of_messages(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    said = without_secrets("401 for 0123456789abcdef at https://me:hunter2@host/x?y")
    assert said == "401 for *** at https://***@host/x?y"


@pytest.mark.parametrize("key", ["variable", "netrc", "none"])
def test_wandb_is_offline_where_there_is_no_key(tmp_path, monkeypatch, key):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if key == "variable":
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    if key == "netrc":
        (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
        (tmp_path / "netrc").chmod(0o600)
    expected = "offline" if key == "none" else "https://api.wandb.ai/gpt2lab"
    assert WandB().place(tmp_path) == expected


def test_the_old_flag_is_one_of_the_trackers():
    assert parse([]).config.log.trackers == ()
    assert parse(["--use_wandb"]).config.log.trackers == ("wandb",)
    both = parse(["--track=mlflow, wandb,", "--use_wandb"])
    assert both.config.log.trackers == ("wandb", "mlflow")
    problems = find_problems(parse(["--track=mlflow,aim"]).config)
    assert problems == ["track 'aim' is none of wandb, trackio, mlflow"]
    assert set(TRACKERS) == set(LIBRARIES)


READ_BACK = {
    "trackio": """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
(run,) = trackio.Api().runs("gpt2lab")
rows = SQLiteStorage.get_logs("gpt2lab", run.name, run_id=run.id)
found = [[row["step"], row["Loss/train"], row["Training/attempt"]] for row in rows if "Loss/train" in row]
texts = [row["Generated_Samples/text"] for row in rows if "Generated_Samples/text" in row]
print(json.dumps([found, texts, run.config["n_embd"]]))
""",
    "mlflow": """
import json, os, sys
from mlflow import MlflowClient
client = MlflowClient(os.environ["STORE"])
(run,) = client.search_runs([client.get_experiment_by_name("gpt2lab").experiment_id])
def values(key): return client.get_metric_history(run.info.run_id, key)
attempts = [one.value for one in values("Training/attempt")]
found = [[one.step, one.value, a] for one, a in zip(values("Loss/train"), attempts, strict=True)]
files = [f.path for f in client.list_artifacts(run.info.run_id, "Generated_Samples/text")]
texts = [open(client.download_artifacts(run.info.run_id, path)).read() for path in sorted(files)]
print(json.dumps([found, texts, int(run.data.params["n_embd"])]))
""",
    "wandb": """
import glob, json, os, struct
from wandb.proto import wandb_internal_pb2 as proto
def records(path):  # leveldb's log format, after a header of seven bytes
    data, at, whole = open(path, "rb").read(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield proto.Record.FromString(whole)
            whole = b""
found, texts, config = [], [], {}
for path in sorted(glob.glob(os.environ["STORE"]), key=os.path.getmtime):
    for record in records(path):
        row = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
        if "Loss/train" in row:
            found.append([row["training_step"], row["Loss/train"], row["Training/attempt"]])
        texts += [row["Generated_Samples/text"]] if "Generated_Samples/text" in row else []
        config |= {u.key: json.loads(u.value_json) for u in record.run.config.update}
print(json.dumps([found, texts, config["n_embd"]]))
""",
}


@pytest.mark.slow
def test_the_libraries_continue_their_runs_and_give_everything_back(
    plain, tmp_path, monkeypatch, capsys
):
    names = list(READ_BACK)
    for name in [n for n in os.environ if n.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    what = "--track and runs sync, read back, no server"
    works_with("wandb", version("wandb"), what)
    works_with("trackio", version("trackio"), what)
    works_with("mlflow", version("mlflow-skinny"), what)
    stores = {"wandb": f"{tmp_path}/r/wandb/offline-run-*/*.wandb"}
    stores |= {"mlflow": f"sqlite:///{tmp_path}/mlflow/mlflow.db", "trackio": f"{tmp_path}/trackio"}
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))  # so that W&B is offline
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRACKIO_DIR", stores["trackio"])
    monkeypatch.setattr(tracking, "FINISH_SECONDS", 300.0)
    flags = [*plain[0], f"--checkpoint_dir={tmp_path}", "--run_name=r", "--checkpoint_freq=1"]
    pretrain(parse([*flags, f"--track={','.join(names)}", "--stop_after_steps=3"]))
    pretrain(parse([*flags, "--resume=2", "--track="]))
    assert "did not take" not in capsys.readouterr().out
    run_dir = tmp_path / "r"
    assert launch.losses(run_dir) == launch.losses(plain[1])
    losses = {step: float.fromhex(loss) for step, loss in launch.losses(run_dir).items()}
    rows = [[n, losses[n], 1] for n in (1, 2, 3)] + [[n, losses[n], 2] for n in (3, 4)]
    texts = [event["text"] for event in launch.events(run_dir, "sample")]

    def call(name: str, *words: object) -> str:
        how = {"capture_output": True, "text": True, "check": True}
        env = os.environ | {"STORE": stores[name]}
        return subprocess.run([sys.executable, *map(str, words)], env=env, **how).stdout

    def check(name: str) -> None:
        send = (launch.MAIN, "runs", "sync", run_dir, f"--to={name}")
        assert f"events sent to {name}" in call(name, *send)
        assert f"{name} has all events" in call(name, *send)
        found = call(name, "-c", READ_BACK[name]).splitlines()[-1]
        assert json.loads(found) == [rows, texts, 16]

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(check, names))
