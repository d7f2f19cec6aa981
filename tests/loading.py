"""A loader over given shards; of GPT-2's windows unless it is told otherwise."""

import torch

from gpt2lab.config.derived import BatchPlan
from gpt2lab.data.loader import Loader
from gpt2lab.data.order import Order, Shuffle
from gpt2lab.data.shards import Shard
from gpt2lab.data.windows import WindowReader

T = 1024


def loader_over(
    shards: tuple[Shard, ...],
    *,
    samples: int,
    shuffle: Shuffle = "shards",
    verify: bool = False,
    context_length: int = T,
    id_limit: int = 50257,
    world_size: int = 1,
    rank: int = 0,
) -> Loader:
    how = {"context_length": context_length}
    order = Order([s.tokens for s in shards], shuffle=shuffle, seed=1, **how)
    reader = WindowReader(shards, id_limit=id_limit, verify=verify, **how)
    micro = min(16, samples // world_size)
    plan = BatchPlan(samples, micro, samples // world_size // micro, world_size, context_length)
    return Loader(order, reader, plan, rank=rank, device=torch.device("cpu"))
