"""`ablate --ray` on a cluster of two nodes of this machine, one of which is killed: the results of `--jobs 2`."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import launch
from tiny import TINY

pytest.importorskip("ray", reason="needs: pip install 'gpt2lab[ray]'")
pytestmark = pytest.mark.slow
OF_TIME = ("seconds_to_loss", "seconds_ratio", "seconds", "step_seconds", "command")


def until(found: Callable[[], Any], ablation: subprocess.Popen[str]) -> Any:
    """Call a function until it finds something."""
    while (it := found()) is None:
        assert ablation.poll() is None, ablation.communicate()
        time.sleep(0.1)
    return it


def run_on(node: psutil.Process) -> str | None:
    """Return the name of the run that a node trains."""
    for process in node.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended since the list was made
            for word in process.cmdline():
                if "/settings/" in word and process.name() != "ray":
                    return Path(word).stem
    return None


def without_times(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: without_times(one) for key, one in found.items() if key not in OF_TIME}
    return [without_times(one) for one in found] if isinstance(found, list) else found


@pytest.mark.parametrize("mirrored", [False, True])
def test_runs_of_a_node_that_dies_resume_elsewhere(start_cluster, tiny_data, tmp_path, mirrored):
    """Mirrored, the second node has a disk of its own, and it takes its runs' folders with it."""
    (tmp_path / "s.txt").write_text("cold: --max_lr=0.0001\nhot: --max_lr=0.01\n")
    out, one = tmp_path / "out", tmp_path / "one"
    words = [str(tmp_path / "s.txt"), "--jobs=2", "--seeds", "1", *TINY, "--eval_freq=4"]
    words += [f"--data_dir={tiny_data}", "--max_steps=16", "--checkpoint_freq=4"]
    launch.worked(launch.script("ablate", *words, f"--out={one}", OMP_NUM_THREADS="1"))

    of_its_own: list[str] = []
    if mirrored:
        if os.geteuid() or subprocess.run(["unshare", "--mount", "true"]).returncode:
            pytest.skip("needs root, to give a node a disk of its own")
        out.mkdir()
        (tmp_path / "mirror").mkdir()
        mount = f'mount -t tmpfs none {out} && exec "$@"'
        of_its_own = ["unshare", "--mount", "bash", "-c", mount, "node"]
        words.append(f"--checkpoint_mirror=file://{tmp_path / 'mirror'}")
    address, second = start_cluster(*of_its_own, fault="step:sleep0.3@*")
    node = psutil.Process(second)
    command = [*launch.words_of("ablate"), *words, f"--out={out}", f"--ray={address}"]

    def begin() -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=launch.environment(), **pipes)

    def has_saved() -> bool | None:
        """Tell whether the second node's run can be continued on another one."""
        place = tmp_path / "mirror" / name if mirrored else out / name
        return True if list(place.glob("step_*/manifest.json")) else None

    ablation = begin()
    name = until(lambda: run_on(node), ablation)
    until(has_saved, ablation)
    ablation.send_signal(signal.SIGINT)
    printed, said = ablation.communicate()
    assert (ablation.returncode, printed) == (0, "")
    assert said.endswith("interrupted; what was trained is saved; start again to continue\n")
    assert run_on(node) is None

    ablation = begin()
    name = until(lambda: run_on(node), ablation)
    until(has_saved, ablation)
    for process in (*node.children(recursive=True), node):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    printed, said = ablation.communicate()
    assert ablation.returncode == 0, said
    assert f"{name}: lost (NodeDiedError); continues from its last checkpoint" in said
    assert launch.events(out / name, "resume")
    found, wanted = (json.loads((at / "ablation.json").read_text()) for at in (out, one))
    assert without_times(found) == without_times(wanted)
    for run in ("cold_seed1", "hot_seed1"):
        assert launch.losses(out / run) == launch.losses(one / run)
        assert launch.parameter_hash(out / run, 16) == launch.parameter_hash(one / run, 16)


def test_an_address_that_never_answers_is_one_line(tiny_data, tmp_path):
    (tmp_path / "s.txt").write_text("a:\nb: --max_lr=0.01\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        words = [tmp_path / "s.txt", f"--out={tmp_path / 'out'}", f"--ray={address}"]
        code, _, error = launch.call("ablate", *words, f"--data_dir={tiny_data}", *TINY)
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith(f"error: --ray {address}: no Ray cluster at this address (")
    assert not (tmp_path / "out").exists()
