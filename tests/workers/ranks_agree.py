"""Train as src/train.py does, and compare all ranks' parameters bit by bit after every step."""

import hashlib
import sys
from typing import Any

import torch.distributed as dist

import gpt2lab.training.steps
from gpt2lab.training.train_step import StepStats, train_step
from tiny import parse, pretrain

compared = 0


def checked_step(model: Any, *args: Any, **kwargs: Any) -> StepStats:
    """Take a real step, then gather every rank's hash."""
    global compared
    stats = train_step(model, *args, **kwargs)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    hashes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, digest.hexdigest())
    assert len(set(hashes)) == 1, f"ranks differ after {compared + 1} steps"
    compared += 1
    return stats


gpt2lab.training.steps.train_step = checked_step
pretrain(parse(sys.argv[1:]))
sys.stdout.write(f"compared {compared} steps\n")  # one write, where print makes two
