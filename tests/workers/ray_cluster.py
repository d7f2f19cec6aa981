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
node = subprocess.Popen([*sys.argv[1:], *start], stdout=subprocess.DEVNULL)
try:
    ray.init(cluster.address, log_to_driver=False)
    while len(ray.nodes()) < 2:
        time.sleep(0.1)
    ray.shutdown()
    print(f"{cluster.address}\n{node.pid}", flush=True)
    sys.stdin.read()
finally:
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (*psutil.Process(node.pid).children(recursive=True), node):
            process.kill()
    cluster.shutdown()
