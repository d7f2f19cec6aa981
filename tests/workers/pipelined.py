"""Train as src/train.py does, steps PIPELINED (1) or one by one (0); BAD_FACTOR multiplies BAD_RANK's step 7 loss."""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import gpt2lab.training.steps
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.model.gpt import GPT
from tiny import parse, pretrain

plain_step, plain_forward, factor = gpt2lab.training.steps.train_step, GPT.forward, [1.0]


def step(model: Any, optimizers: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Take a real step, which rank 1 may spoil."""
    number = batch.first_sample // batch.samples + 1
    is_bad_rank = os.environ.get("RANK", "0") == os.environ["BAD_RANK"]
    bad = float(os.environ.get("BAD_FACTOR", "nan"))
    factor[0] = bad if is_bad_rank and number == 7 else 1.0
    return plain_step(model, optimizers, batch, *args, **kwargs)


Runtime.runs_ahead = os.environ["PIPELINED"] == "1"  # type: ignore[assignment,method-assign]
gpt2lab.training.steps.train_step = step
GPT.forward = lambda self, *a: plain_forward(self, *a) * factor[0]  # type: ignore[method-assign]
pretrain(parse(sys.argv[1:]))
