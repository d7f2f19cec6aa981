"""Two machines, as far as one can play them: two network namespaces, joined by a cable of their own.

Where only processes fail, and not the network, both are on this machine's loopback.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PACE, FaultRun, program_before

import launch
from loopback import free_port

pytestmark = pytest.mark.fault

NODES = (f"g2l-{os.getpid()}-a", f"g2l-{os.getpid()}-b")
ADDRESSES = ("10.77.13.1", "10.77.13.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture
def cable() -> Iterator[None]:
    """Make two namespaces with a veth pair between them; skip where that is not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` to make network namespaces with")
    try:
        for node in NODES:
            ip("netns", "add", node)
            # As on Debian: `ip netns exec` puts this file in the place of /etc/hosts.
            Path("/etc/netns", node).mkdir(parents=True)
            hosts = f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n"
            Path("/etc/netns", node, "hosts").write_text(hosts)
        ip(*f"link add wire netns {NODES[0]} type veth peer wire netns {NODES[1]}".split())
        for node, address in zip(NODES, ADDRESSES, strict=True):
            ip("-n", node, "addr", "add", f"{address}/24", "dev", "wire")
            ip("-n", node, "link", "set", "wire", "up")
            ip("-n", node, "link", "set", "lo", "up")
        yield
    except (subprocess.CalledProcessError, PermissionError) as error:
        why = getattr(error, "stderr", error)
        pytest.skip(f"network namespaces are not allowed here: {why}")
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "del", node], capture_output=True)
            shutil.rmtree(Path("/etc/netns", node), ignore_errors=True)


def torchrun(node: int, address: str, port: int) -> list[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={node}"]
    return [*words, "--nproc_per_node=1", f"--master_addr={address}", f"--master_port={port}"]


def run_node(run: FaultRun, node: int, *command: str, **env: str) -> subprocess.Popen[str]:
    said = f"node{node}.txt"
    process = run.run_command([*command], said=said, errors=said, **env)
    (run.folder / "err.txt").write_text("see node0.txt and node1.txt")
    return process


def start_node(run: FaultRun, node: int, *more: str, **env: str) -> subprocess.Popen[str]:
    """Start one machine's torchrun, as a user would type it there."""
    command = [*torchrun(node, ADDRESSES[0], 29577), str(launch.TRAIN), *run.argv(*more)]
    return run_node(run, node, "ip", "netns", "exec", NODES[node], *command, **env)


@pytest.mark.usefixtures("cable")
def test_one_of_two_nodes_is_killed_and_both_go_on(run, reference):
    first, second = (start_node(run, node, FAULT=PACE) for node in (0, 1))
    run.wait_for(first, "step", 12)
    workers = run.workers(second)
    os.killpg(second.pid, signal.SIGKILL)  # the machine is gone: its launcher and its worker
    os.kill(workers[1], signal.SIGKILL)
    assert run.end_of(first) != 0
    newest = max(run.saved())
    assert newest >= 10, "the last commit before the node was lost"
    again = [start_node(run, node, "--resume=latest") for node in (0, 1)]
    assert [run.end_of(process) for process in again] == [0, 0]
    assert run.events("resume")[-1]["from_step"] == newest
    run.assert_equals(reference(2))


def start_script(
    run: FaultRun, node: int, port: int, program: Path = launch.TRAIN
) -> subprocess.Popen[str]:
    """Start one machine's run_until_done.sh, which starts its torchrun again until the run is complete."""
    script = [str(launch.SCRIPTS / "run_until_done.sh"), *torchrun(node, "127.0.0.1", port)]
    words = [*script, str(program), *run.argv("--hang_seconds=3")]
    return run_node(run, node, *words, PAUSE="1", FAULT=PACE)


def send(run: FaultRun, number: signal.Signals, node: subprocess.Popen[str], worker: int) -> None:
    """Send a signal to all processes of a machine: script, launcher and worker."""
    os.killpg(node.pid, number)
    os.kill(worker, number)


def test_row_45_a_node_that_freezes_is_named_and_waited_for(run, reference):
    """The other one ends its hang and starts again; once the frozen one moves, both go on by themselves."""
    port = free_port()
    first, second = (start_script(run, node, port) for node in (0, 1))
    run.wait_for(first, "step", 12)
    worker = run.workers(second)[1]
    send(run, signal.SIGSTOP, second, worker)
    said = run.folder / "node0.txt"
    run.wait_until(first, lambda: "starting again" in said.read_text(), "the end of the hang")
    assert "all wait for: rank 1 on" in said.read_text()
    assert (run.status()["state"], run.status()["exit_code"]) == ("failed", 78)
    send(run, signal.SIGCONT, second, worker)
    assert [run.end_of(process) for process in (first, second)] == [0, 0]
    assert min(event["from_step"] for event in run.events("resume")) >= 10
    run.assert_equals(reference(2))


def test_row_45_a_slow_node_is_named_and_one_that_reboots_is_waited_for(run, reference, tmp_path):
    """All its processes are gone at once, and come back later with the same command line; the other one never left."""
    slow = program_before(tmp_path, "gpt2lab.model.gpt:GPT", "forward", "time.sleep(0.05 * rank)")
    port = free_port()
    first, second = (start_script(run, node, port, slow) for node in (0, 1))
    run.wait_for(first, "warning", 30)
    [warning] = [e["message"] for e in run.events("warning") if "is slow" in e["message"]]
    assert warning.startswith("rank 1 on ")
    send(run, signal.SIGKILL, second, run.workers(second)[1])
    said = run.folder / "node0.txt"
    run.wait_until(first, lambda: "starting again" in said.read_text(), "the survivor's end")
    assert "another rank of this run died" in said.read_text()
    again = start_script(run, 1, port)
    assert [run.end_of(process) for process in (first, again)] == [0, 0]
    [resumed] = run.events("resume")
    assert resumed["from_step"] >= 30, "the survivor saved the step that both had done"
    run.assert_equals(reference(2))
