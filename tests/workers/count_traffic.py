"""Train as src/train.py does, and tell what the collectives of the last step carried, and when."""

import json
import sys
from typing import Any

import gpt2lab.distributed.runtime
import gpt2lab.training.steps
from benchmarks.sharing_worker import Traffic
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.training.train_step import StepStats, train_step
from tiny import parse, pretrain

traffic = Traffic()
begun: list[dict[str, int]] = []  # calls so far, as each micro-batch begins
counted: list[dict[str, Any]] = []
grad_sync = Strategy.grad_sync


def noted_grad_sync(*args: Any, **kwargs: Any) -> Any:
    begun.append(dict(traffic.calls))
    return grad_sync(*args, **kwargs)


def counted_step(*args: Any, **kwargs: Any) -> StepStats:
    global traffic
    traffic = Traffic()
    begun.clear()
    with traffic:
        stats = train_step(*args, **kwargs)
    counted.append({"begun": list(begun), "calls": traffic.calls, "bytes": traffic.bytes})
    return stats


Strategy.grad_sync = noted_grad_sync  # type: ignore[method-assign]
gpt2lab.training.steps.train_step = counted_step
gpt2lab.distributed.runtime.fastest_dtype = lambda device: "bf16"  # emulated where it is not
pretrain(parse(sys.argv[1:]))
sys.stdout.write(f"counted {json.dumps(counted[-1])}\n")  # print writes the end apart
