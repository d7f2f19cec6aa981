"""A Ray cluster of two nodes with a processor each: prints its address, and ends with its standard input.

The second line is the process of the second node; the words after this program's name start that, as `unshare` may.
"""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster

LITTLE = 80_000_000  # bytes of an object store
cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": LITTLE}
)
start = [Path(sys.executable).with_name("ray"), "start", "--block", "--num-cpus=1"]
start += [f"--address={cluster.address}", f"--object-store-memory={LITTLE}"]
nodes: list[subprocess.Popen[bytes]] = []


def second_node() -> subprocess.Popen[bytes]:
    """Start the second node; a driver joins either of the two, by their ids, and must outlive this one."""
    while True:
        nodes.append(subprocess.Popen([*sys.argv[1:], *start], stdout=subprocess.DEVNULL))
        for _ in range(2):  # who joins before the second node is there joins the first
            ray.init(cluster.address, log_to_driver=False)
            while sum(node["Alive"] for node in ray.nodes()) < 2:
                time.sleep(0.1)
            joined = ray.get_runtime_context().get_node_id()
            ray.shutdown()
        if joined == cluster.head_node.node_id:
            return nodes[-1]
        end(nodes[-1])


def end(node: subprocess.Popen[bytes]) -> None:
    """End a node and what it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = psutil.Process(node.pid).children(recursive=True)
        for process in processes:
            process.terminate()
        psutil.wait_procs(processes, timeout=10)
        for process in (*processes, psutil.Process(node.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    node.wait()


try:
    print(f"{cluster.address}\n{second_node().pid}", flush=True)
    sys.stdin.read()
finally:
    for node in nodes:
        end(node)
    cluster.shutdown()
