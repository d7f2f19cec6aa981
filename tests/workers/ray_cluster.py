"""A Ray cluster of two nodes with a processor each: prints its address, and ends with its standard input."""

import sys

from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
try:
    cluster.add_node(num_cpus=1)
    print(cluster.address, flush=True)
    sys.stdin.read()
finally:
    cluster.shutdown()
