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


def end(node: subprocess.Popen[bytes]) -> None:
    """End a node and what it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (*psutil.Process(node.pid).children(recursive=True), node):
            process.kill()
    node.wait()


def node_of_a_driver(address: str) -> str:
    """Return the id of the node that drivers join: of all with their address, one by the nodes' ids."""
    ray.init(address, log_to_driver=False)
    joined: str = ray.get_runtime_context().get_node_id()
    while len(ray.nodes()) < 2:
        time.sleep(0.1)
    ray.shutdown()
    return joined


while True:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": LITTLE}
    )
    start = [Path(sys.executable).with_name("ray"), "start", "--block", "--num-cpus=1"]
    start += [f"--address={cluster.address}", f"--object-store-memory={LITTLE}"]
    node = subprocess.Popen([*sys.argv[1:], *start], stdout=subprocess.DEVNULL)
    node_of_a_driver(cluster.address)  # waits for the second node
    if node_of_a_driver(cluster.address) == cluster.head_node.node_id:
        break
    # Drivers would be lost with the second node, which the tests kill.
    end(node)
    cluster.shutdown()
try:
    print(f"{cluster.address}\n{node.pid}", flush=True)
    sys.stdin.read()
finally:
    end(node)
    cluster.shutdown()
