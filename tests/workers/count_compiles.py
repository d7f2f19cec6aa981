"""Train as src/train.py does, and count the graphs that torch.compile makes: after the first step and at the end.

With COMPILE_EVALUATION the validation is compiled too, as on a GPU.
"""

import functools
import os
import sys
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import gpt2lab.training.steps
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.training.train_step import StepStats, train_step
from tiny import parse, pretrain

after_first: int | None = None


def counted_step(*args: Any, **kwargs: Any) -> StepStats:
    """Take a real step and note the number of graphs after the first."""
    global after_first
    stats = train_step(*args, **kwargs)
    if after_first is None:
        after_first = counters["stats"]["unique_graphs"]
    return stats


# Traces and guards as always, but writes no C++.
nn.Module.compile = functools.partialmethod(  # type: ignore[method-assign,assignment]
    nn.Module.compile, backend="eager"
)
torch.compile = functools.partial(torch.compile, backend="eager")
if "COMPILE_EVALUATION" in os.environ:
    Strategy.compiles_evaluation = True  # type: ignore[method-assign,assignment]
gpt2lab.training.steps.train_step = counted_step
pretrain(parse(sys.argv[1:]))
graphs = counters["stats"]["unique_graphs"]
# In one write, the line's end with it: several processes have one output.
sys.stdout.write(f"graphs after step 1: {after_first}, at the end: {graphs}\n")
