"""A loader of GPT-2's windows over given shards."""

import torch

from gpt2lab.config.derived import BatchPlan
from gpt2lab.data.loader import Loader
from gpt2lab.data.order import Order, Shuffle
from gpt2lab.data.shards import Shard
from gpt2lab.data.windows import WindowReader

T = 1024


def loader_over(
    shards: tuple[Shard, ...], *, samples: int, shuffle: Shuffle = "shards", verify: bool = False
) -> Loader:
    order = Order([s.tokens for s in shards], context_length=T, shuffle=shuffle, seed=1)
    reader = WindowReader(shards, context_length=T, id_limit=50257, verify=verify)
    plan = BatchPlan(samples, 16, samples // 16, 1, T)
    return Loader(order, reader, plan, rank=0, device=torch.device("cpu"))
