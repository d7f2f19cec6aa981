"""What goes wrong in the first hour: misspelt names, impatience, no network, files moved or deleted."""

import contextlib
import errno
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
import torch

import launch
from corpora import write_jsonl
from gpt2lab import paths
from gpt2lab.commands import runs
from gpt2lab.config.derived import MANY_EPOCHS
from gpt2lab.data import hub
from gpt2lab.errors import ConfigError
from gpt2lab.planner import auto
from gpt2lab.runs import overview
from gpt2lab.runs.folder import RunFolder
from launch import SCRIPTS, TRAIN, ask, call, rejected
from tiny import resolved
from whole_run import Run


@pytest.fixture(scope="module")
def trained_once(tiny_data, tmp_path_factory) -> Path:
    """Return a working directory with a run of four steps in runs/tiny; treat as read-only."""
    folder = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(tiny_data, folder / "data")
    run = Run(folder / "data", folder / "runs")
    run.train("--max_steps=4", "--checkpoint_freq=2", "--eval_freq=4")
    return folder


@pytest.fixture
def place(trained_once, tmp_path) -> Path:
    return Path(shutil.copytree(trained_once, tmp_path / "place"))


@pytest.fixture
def flags(place) -> list[str]:
    return [*Run(place / "data", place / "runs").flags, "--max_steps=4"]


@pytest.mark.parametrize(
    "typed",
    [
        *("--run_name=tny --resume=latest", "--run_name=t --resume=4", "--resume=lastest"),
        *("--resume=bset", "--init_from=resume", "--init_from=scratch"),
    ],
)
def test_a_misspelt_or_foreign_word_is_answered_with_the_right_one(flags, typed, wording):
    flags = [one for one in flags if "run_name" not in one or "run_name" not in typed]
    wording(rejected(call(TRAIN, *flags, *typed.split())))


def test_missing_or_misspelt_data_and_sources_are_answered_with_the_right_ones(place, monkeypatch):
    monkeypatch.setattr(paths, "REPOSITORY", place)
    words = ["--model=gpt2-nano", f"--checkpoint_dir={place / 'runs'}", "--run_name=other"]
    assert rejected(call(TRAIN, *words)).endswith("; other data: --data_dir data/NAME")
    assert "other data" not in rejected(call(TRAIN, *words, "--data_dir=nowhere"))
    shutil.copytree(place / "data", place / "data" / "tiny_text")
    for typed in ("tiny_txet", "data/tiny_txet"):
        for words in ((TRAIN, "--data_dir"), ("data", "verify")):
            line = rejected(call(*words, typed, folder=place))
            assert line.endswith("no such data folder; did you mean data/tiny_text?")
    line = rejected(call("prepare_data.py", "python_stdlib", folder=place))
    assert line == "error: python_stdlib: no such file or folder; did you mean python-stdlib?"
    assert "hf:: no such file or folder, and not " in rejected(call("prepare_data.py", "hf:"))
    line = rejected(call("prepare_data.py", "texts", "--data_dir=data/texts"))
    assert line == "error: unknown flag --data_dir: here it is --out"


needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
has_lm_eval = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not has_lm_eval, reason="lm-eval is not installed")
_TELLS_OF_TORCH = 'import atexit, sys; atexit.register(lambda: print("torch" in sys.modules))'


@pytest.mark.parametrize(
    "typed",
    [
        pytest.param("evaluate {} --device=cuda", marks=needs_no_gpu),
        pytest.param("evaluate {} --tasks=piqa,piqua", marks=needs_lm_eval),
        "train --run_name={} --resume=auto --gpus=2 --total_batch_size=33",
    ],
)
def test_a_rejection_does_not_wait_for_torch(typed, tiny_run, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(_TELLS_OF_TORCH)
    run = tiny_run(max_steps=1)
    words = [*typed.format(run.path.name).split(), "--checkpoint_dir", str(run.path.parent)]
    done = launch.python(launch.MAIN, *words, PYTHONPATH=f"{tmp_path}:{TRAIN.parent}")
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr


def test_memory_is_compared_with_what_is_free_before_a_model_is_built(flags, place, monkeypatch):
    for width, says in (
        (10**7, "n_embd 10000000 must be at most 1000000"),
        (10**6, "n_embd 1000000: weights, gradients and optimizer take "),
    ):
        assert says in rejected(call(TRAIN, *flags, f"--n_embd={width}", "--run_name=wide"))
        assert not (place / "runs" / "wide").exists()

    def memory(*more: str) -> str:
        done = launch.worked(call(TRAIN, *flags, "--run_name=other", "--dry_run", *more))
        (line,) = [one for one in done.stdout.splitlines() if one.startswith("memory ")]
        return line

    monkeypatch.setattr(auto.DetectedHardware, "free_memory", lambda seen, ranks: 8e9)
    assert memory().endswith("for each rank, 7.5 GiB free here")
    wide = memory("--n_embd=8192")
    assert "does not fit, not even one sequence at a time; choose a smaller model" in wide
    long = ("--context_length=256", "--total_batch_size=262144", "--mini_batch_size=1024")
    assert "does not fit, --mini_batch_size " in memory(*long, "--n_embd=512")
    found = json.loads(call(TRAIN, *flags, "--run_name=o", "--dry_run", "--json").stdout)["memory"]
    assert found["available_bytes"] == 8e9
    assert found["fits"] is True
    assert 0 < found["needed_bytes"] < 8e9
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    offload = ("--parallel=fsdp", "--fsdp_offload")
    assert memory(*offload).split(maxsplit=1)[1].startswith("not counted: --fsdp_offload keeps")
    done = call(TRAIN, *flags, "--run_name=o", "--dry_run", "--json", *offload)
    assert set(json.loads(done.stdout)["memory"].values()) == {None}


@pytest.mark.slow
def test_an_error_that_all_ranks_share_is_one_line_and_torchruns_root_cause(flags, monkeypatch):
    done = launch.train([*flags, "--run_name=three"], world=3)
    said = "total_batch_size 128 is not a multiple of mini_batch_size"
    assert [line for line in done.stderr.splitlines() if line.startswith(f"error: {said}")]
    assert said in done.stderr.rpartition("Root Cause")[2]
    # Ranks are started once.
    assert call(TRAIN, *flags, "--run_name=two", "--gpus=2", "--dry_run").returncode == 0
    monkeypatch.setenv("RANK", "0")
    assert call(TRAIN, *flags, "--run_name=two", "--gpus=2").returncode == 2


_INTERRUPTS = """
import os, signal, sys

def interrupt(event, args):
    if event == "import" and args[0] == "gpt2lab.errors":
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(interrupt)
"""


@pytest.mark.parametrize(
    "program",
    [
        *([TRAIN], [TRAIN.with_name("finetune.py")], [SCRIPTS / "sample.py"]),
        *(["-m", "gpt2lab"], ["-m", "gpt2lab.train"], ["-m", "gpt2lab.finetune"]),
        ["-c", "from gpt2lab.__main__ import program; program()"],  # as the console script does
    ],
)
def test_ctrl_c_while_modules_load_prints_no_traceback(program, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(_INTERRUPTS)
    done = launch.python(*program, "--help", PYTHONPATH=f"{tmp_path}:{TRAIN.parent}")
    assert done == (-signal.SIGINT, "", "")


def test_a_deleted_working_directory_is_an_error_before_anything_else(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"rmdir {gone}; exec {sys.executable} {TRAIN} --checkpoint_dir={tmp_path}/runs"
    done = subprocess.run(["bash", "-c", script], cwd=gone, capture_output=True, text=True)
    said = "error: the working directory: No such file or directory; change to another\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
    assert list(tmp_path.iterdir()) == []


def test_a_limit_of_a_files_size_is_named_and_a_folder_that_is_missing(flags, place):
    def limited(blocks: int, *words: object) -> launch.Done:
        script = f"ulimit -f {blocks}; exec {shlex.join(map(str, words))}"
        done = subprocess.run(["bash", "-c", script], **launch.TO_ITS_END)
        return launch.Done(done.returncode, done.stdout, launch.without_progress(done.stderr))

    done = limited(1, sys.executable, TRAIN, *flags, "--run_name=new")
    said = f"error: {place}/runs/new/config.json: File too large; raise the limit of a file's size (`ulimit -f`), "
    assert (done.returncode, done.stderr) == (75, f"{said}or choose another disk\n")
    said = rejected(limited(0, *launch.words_of("evaluate"), place / "runs" / "tiny"))
    assert said.startswith("error: No usable temporary directory found in ['/tmp', ")
    assert said.endswith("]; set TMPDIR to a folder that can be written")
    words = [*launch.words_of("plot"), place / "runs" / "tiny"]
    done = limited(0, "env", "HOME=/dev/null", *words)
    said = done.stderr.splitlines()[-1]  # the library has its say before
    assert (done.returncode, said[:14]) == (2, "error: plots: ")
    assert "MPLCONFIGDIR" in said


def test_an_error_that_a_full_disk_cannot_take_keeps_its_exit_code():
    words = [*launch.words_of("evaluate"), "no_such_run"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(words, stderr=full, stdout=subprocess.DEVNULL).returncode == 2


def test_an_interrupted_preparation_says_what_an_earlier_start_has_kept(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "texts.jsonl", ["some text of a document"] * 50)
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("gpt2lab.data.prepare.pipeline.plan_preparation", interrupted)
    monkeypatch.chdir(tmp_path)
    prepare = ("prepare_data.py", source, "--out", tmp_path / "out")
    assert call(*prepare).stderr == "error: interrupted; nothing was written\n"
    (tmp_path / "out.partial" / "groups" / "group_00000").mkdir(parents=True)
    kept = "error: interrupted; out.partial keeps what an earlier start prepared\n"
    assert call(*prepare).stderr == kept


class Network:
    """What the resolver and the sockets of a machine answer; the clock goes on while a connection hangs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, int]] = []
        self.tried: list[str] = []
        self.addresses = ["10.0.0.1"]
        self.is_up, self.hangs, self.seconds = True, False, 0.0
        for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setattr(hub, "_is_ours", False)
        monkeypatch.setattr(hub.socket, "getaddrinfo", self.getaddrinfo)
        monkeypatch.setattr(hub.socket, "create_connection", self.create_connection)
        monkeypatch.setattr(hub, "monotonic", lambda: self.seconds)

    def getaddrinfo(self, host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        self.asked.append((host, port))
        return [
            (socket.AF_INET6 if ":" in one else socket.AF_INET, 1, 6, "", (one, port))
            for one in self.addresses
        ]

    def create_connection(self, address: tuple[str, int], timeout: float) -> socket.socket:
        self.tried.append(address[0])
        if self.is_up:
            return socket.socket()
        self.seconds += timeout if self.hangs else 0.0
        raise OSError("no network")


def test_the_hubs_libraries_are_offline_while_it_is_out_of_reach(monkeypatch):
    import datasets.config
    import huggingface_hub.constants

    network = Network(monkeypatch)
    before = huggingface_hub.constants.HF_HUB_OFFLINE
    for is_up in (True, False, False, True, True):
        network.is_up = is_up
        assert hub.is_offline() is not is_up
        assert os.environ["HF_HUB_OFFLINE"] == ("0" if is_up else "1")
        if network.asked[1:]:  # before, they have what they read at import
            assert huggingface_hub.constants.HF_HUB_OFFLINE is not is_up
            assert datasets.config.HF_HUB_OFFLINE is not is_up
    assert network.asked == 5 * [("huggingface.co", 443)]
    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = before


@pytest.mark.parametrize(
    ("name", "value", "port"),
    [
        *(("https_proxy", f"{begin}proxy.example:3128", 3128) for begin in ("http://", "")),
        *(("ALL_PROXY", "http://proxy.example", 80), ("HF_HUB_OFFLINE", "1", None)),
        ("ALL_PROXY", "socks5://proxy.example", 1080),
    ],
)
def test_a_proxy_is_asked_in_place_of_the_hub_and_nobody_offline(monkeypatch, name, value, port):
    network = Network(monkeypatch)
    monkeypatch.setenv(name, value)
    assert hub.is_offline() is not bool(port)
    assert network.asked == ([("proxy.example", port)] if port else [])


def test_addresses_that_hang_share_one_deadline(monkeypatch):
    network = Network(monkeypatch)
    network.addresses = [*(f"::{number}" for number in range(1, 9)), "10.0.0.1"]
    network.is_up, network.hangs = False, True
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "datasets.config", None)  # type: ignore[arg-type]
    assert hub.is_offline()
    assert network.tried[:3] == ["::1", "10.0.0.1", "::2"]
    assert network.seconds <= hub._SECONDS


@pytest.mark.parametrize(
    ("script", "words"),
    [("sample.py", ["hf:nosuch/nosuch", "--prompt=a"]), ("prepare_data.py", ["hf:nosuch/nosuch"])],
)
def test_a_name_on_the_hub_fails_fast_offline(script, words):
    hub_of_none = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}  # discard
    line = rejected(launch.script(script, *words, **hub_of_none))
    assert line.startswith("error: hf:nosuch/nosuch: ")
    assert "the Hugging Face Hub cannot be reached" in line


@pytest.mark.parametrize("lines", [60, 3000])
def test_preparation_ends_with_a_command_that_can_train(tmp_path, lines):
    source = write_jsonl(tmp_path / "texts.jsonl", [f"text number {n}" * 20 for n in range(lines)])
    for _ in range(2):  # new, and already prepared
        done = launch.worked(call("prepare_data.py", source, "--out", tmp_path / "a b"))
        head, last = done.stdout.splitlines()[-1].split(": ", 1)
        assert head == "train with"
    assert done.stdout.splitlines()[0].endswith("a b: already prepared")
    words = shlex.split(last)
    start = resolved(words[[word.endswith("train.py") for word in words].index(True) + 1 :])
    assert start.data.folder == tmp_path / "a b"
    assert 0 < start.plan.epochs < MANY_EPOCHS
    assert start.plan.disk_bytes < 10**9
    few = write_jsonl(tmp_path / "few.jsonl", ["a few words " * 9, "and more"])
    said = launch.worked(call("prepare_data.py", few, "--out", tmp_path / "few")).stdout
    assert "too little text: " in said.splitlines()[-1]


def test_a_loop_of_links_is_no_place_for_data(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "text.txt").write_text("text")
    words = ("--tokenizer=bytes", f"--out={tmp_path / 'loop'}")
    said = rejected(call("prepare", tmp_path / "text.txt", *words))
    assert said.startswith(f"error: {tmp_path}/loop: holds something else already; ")


def test_data_that_were_moved_are_asked_for(place):
    shutil.rmtree(place / "runs")
    Run(place / "data", place / "runs").train("--max_steps=1")
    (place / "data").rename(place / "elsewhere")
    resume = ["--checkpoint_dir", str(place / "runs"), "--run_name=tiny", "--resume=latest"]
    line = rejected(call(TRAIN, *resume))
    assert "no longer there; if they were moved, say where with --data_dir" in line
    code, line = ask("evaluate.py", "tiny", "--device=cpu", folder=place)
    assert (code, line.endswith("if they were moved, say where with --val")) == (2, True)
    moved = call(TRAIN, *resume, f"--data_dir={place / 'elsewhere'}")
    assert moved.stdout.startswith("tiny: already complete at step 1; nothing to do (")


def test_a_deleted_newest_checkpoint_is_missed(place):
    run_dir = place / "runs" / "tiny"
    shutil.rmtree(run_dir / "step_00000004")
    says = f"{run_dir}: its newest checkpoint, step_00000004, was deleted; step 2 is used"
    done = call("evaluate.py", "tiny", f"--checkpoint_dir={place / 'runs'}", "--device=cpu")
    assert done.returncode == 0
    assert f"warning: {says}" in done.stderr.splitlines()
    resume = ["--checkpoint_dir", place / "runs", "--run_name=tiny", "--resume=latest"]
    assert says in call(TRAIN, *resume, "--dry_run").stdout
    shutil.rmtree(run_dir / "step_00000002")
    code, line = ask("evaluate.py", "tiny", folder=place)
    assert (code, line.endswith("step_00000004, was deleted; no other is left")) == (2, True)


def test_resuming_a_run_in_use_that_has_saved_nothing_says_so(flags, place):
    with contextlib.closing(RunFolder(place / "runs" / "begun")):
        line = rejected(call(TRAIN, *flags, "--run_name=begun", "--resume=latest"))
    assert f"in use by process {os.getpid()}" in line
    assert "has not saved a checkpoint yet" in line


def test_status_shows_runs_whose_files_are_missing_or_damaged(place):
    runs = place / "runs"
    shutil.copytree(runs / "tiny", runs / "no_settings")
    (runs / "no_settings" / "config.json").unlink()
    shutil.copytree(runs / "tiny", runs / "torn")
    (runs / "torn" / "status.json").write_text('{"state": "compl')
    found = {run["run_name"]: run for run in ask("status", "--json", folder=place)["runs"]}
    states = {name: run["state"] for name, run in found.items()}
    assert states == {"tiny": "completed", "no_settings": "completed", "torn": "unknown"}
    assert found["no_settings"]["problem"].startswith("config.json is missing")
    assert found["torn"]["problem"].startswith("status.json is missing or damaged")
    assert (found["torn"]["step"], found["torn"]["last_step"]) == (4, 4)


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_table_of_runs_fits_the_terminal(place, columns):
    name = "gpt2-micro_20261122-185644_with_another_name"
    (place / "runs" / "tiny").rename(place / "runs" / name)
    (run,) = overview.read_runs(place / "runs")
    header, line = overview.status_table([run], width=columns).splitlines()
    assert max(len(header), len(line)) <= columns
    assert line.split()[:3] == [name, "completed", "4/4"]
    assert ("last write" in header) == (columns == 200)
    assert overview.status_table([run]) == overview.status_table([run], width=200)


def runs_command(place: Path, *words: str) -> launch.Done:
    return call("runs", *words, f"--checkpoint_dir={place / 'runs'}")


def test_rm_asks_first_names_what_would_go_and_takes_a_checkpoints_labels_along(place):
    run_dir = place / "runs" / "tiny"
    done = runs_command(place, "rm", "tiny")  # without a terminal nobody can be asked
    assert "2 checkpoints up to step 4, " in done.stdout
    assert ", labels best" in done.stdout
    line = "error: stdin is not a terminal, so nothing was asked or changed; add --yes\n"
    assert (done.returncode, done.stderr) == (2, line)
    assert run_dir.is_dir()
    done = launch.worked(runs_command(place, "rm", "tiny/step_00000004", "--yes"))
    assert "labelled best" in done.stdout
    assert "1 checkpoint up to step 2, " in runs_command(place, "rm", "tiny").stdout
    assert sorted(path.name for path in run_dir.glob("step_*")) == ["step_00000002"]
    assert list((run_dir / "labels").iterdir()) == []
    (place / "runs" / ".del-other-0123abcd" / "step_00000002").mkdir(parents=True)  # by kill -9
    assert runs_command(place, "rm", "tiny", "--yes").returncode == 0
    assert not [path for path in (place / "runs").iterdir() if path.is_dir()]


def test_an_archived_run_is_in_no_list_and_can_be_taken_back(place):
    runs = place / "runs"
    before = sorted(path.name for path in (runs / "tiny").rglob("*"))
    assert runs_command(place, "archive", "tiny", "--yes").returncode == 0
    assert ask("status", "--json", folder=place)["runs"] == []
    assert sorted(path.name for path in (runs / "archive" / "tiny").rglob("*")) == before
    (runs / "archive" / "tiny").rename(runs / "tiny")
    again = call(TRAIN, *("--checkpoint_dir", runs, "--run_name=tiny", "--resume=latest"))
    assert again.stdout.startswith("tiny: already complete at step 4; nothing to do (")
    shutil.copytree(runs / "tiny", runs / "archive" / "tiny")
    done = runs_command(place, "archive", "tiny", "--yes")
    assert (done.returncode, "is there already" in done.stderr) == (2, True)
    words = (runs / "archive" / "tiny", "--to", runs / "tiny" / "sub")
    done = runs_command(place, "archive", *words, "--yes")
    assert f"lies inside the run {runs / 'tiny'};" in rejected(done)
    shutil.move(runs / "archive", runs / "tiny" / "sub")
    (runs / "tiny" / "sub" / "tiny" / "metrics.jsonl").unlink()
    done = runs_command(place, "rm", "tiny", "--yes")
    assert f"holds the run {runs / 'tiny' / 'sub' / 'tiny'};" in rejected(done)


def test_a_run_archived_to_another_disk_is_copied_before_it_goes(place, monkeypatch):
    run_dir, to = place / "runs" / "tiny", place / "disk" / "tiny"
    before = {path.name: path.stat().st_size for path in run_dir.rglob("*")}
    other_disk = [OSError(errno.EXDEV, "Invalid cross-device link"), DEFAULT]
    monkeypatch.setattr(os, "rename", Mock(wraps=os.rename, side_effect=other_disk))
    runs.archive(run_dir, to)
    assert {path.name: path.stat().st_size for path in to.rglob("*")} == before
    assert (run_dir.exists(), os.listdir(to.parent)) == (False, ["tiny"])


@pytest.mark.parametrize("verb", ["rm", "archive"])
def test_a_run_in_use_or_a_link_to_a_run_is_never_touched(place, verb):
    run_dir, link = place / "runs" / "tiny", place / "runs" / "link"
    link.symlink_to(run_dir)
    with contextlib.closing(RunFolder(run_dir)):
        before = sorted((place / "runs").rglob("*"))
        for name in ("tiny", "tiny/step_00000002"):
            line = rejected(runs_command(place, verb, name, "--yes"))
            assert "in use by process" in line or "whole runs are archived" in line
    line = rejected(runs_command(place, verb, "link", "--yes"))
    assert line == f"error: {link}: a link to {run_dir}; name that folder, and remove the link"
    assert sorted((place / "runs").rglob("*")) == before


def found_by(place: Path, *names: str) -> list[str]:
    return [folder.name for folder in runs._find(names, place / "runs")]


def test_a_folder_of_another_program_is_neither_run_nor_checkpoint(place):
    run_dir = place / "runs" / "tiny"
    site, tracked, export = (place / "runs" / name for name in ("site", "tracked", "export"))
    for folder in (site, tracked, export, run_dir / "site", site / "step_00000004"):
        folder.mkdir()
        (folder / "manifest.json").write_text('{"name": "web application", "icons": []}')
    (tracked / "metrics.jsonl").write_text('{"loss": 1.0}\n')
    (tracked / "config.json").write_text('{"model_type": "gpt2", "n_layer": 12}')
    (export / "config.json").write_text("[not JSON")
    # Named as a checkpoint, with our manifest, but in no run.
    shutil.copytree(run_dir / "step_00000004", place / "step_00000004")
    (run_dir / "corrupt-step_00000008-ab12").mkdir()
    shutil.copy(run_dir / "step_00000004" / "manifest.json", run_dir / "corrupt-step_00000008-ab12")
    for name in ("site", "tracked", "export", "tiny/site", "site/step_00000004"):
        with pytest.raises(ConfigError, match="neither a run nor a checkpoint"):
            found_by(place, name)
    aside = "corrupt-step_00000008-ab12"
    assert found_by(place, f"tiny/{aside}", "tiny/step_00000002") == [aside, "step_00000002"]
    assert found_by(place, "tiny/step_00000002", "tiny", str(run_dir)) == ["tiny"]
    for path in run_dir.glob("*step_*"):
        shutil.rmtree(path)
    assert found_by(place, "tiny") == ["tiny"]  # a run that saved nothing


def test_a_run_is_not_moved_into_itself_and_what_is_no_run_is_not_deleted(place):
    folder = place / "runs" / "tiny"
    for to in (folder, folder / "sub"):
        line = rejected(runs_command(place, "archive", "tiny", "--to", str(to), "--yes"))
        assert line.endswith(f"--to {to}: lies inside the run {folder}; choose another --to")
    assert not (folder / "sub").exists()
    for name in ("data", "nothing"):
        rejected(call("runs", "rm", name, "--yes", f"--checkpoint_dir={place}"))
    assert "nowhere: no such" in rejected(call("runs list", "--checkpoint_dir", "nowhere"))
    assert (place / "data").is_dir()
