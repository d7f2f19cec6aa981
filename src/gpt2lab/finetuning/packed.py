"""Several conversations in one row of ids, none attending to another: the model's side and the loader's."""

from typing import Any

import numpy as np
import torch
from torch import nn

from gpt2lab.config.derived import BatchPlan
from gpt2lab.data.loader import GlobalBatch, Loader
from gpt2lab.data.mixture import Mixture
from gpt2lab.data.order import Order
from gpt2lab.data.windows import WindowReader, hash_windows
from gpt2lab.finetuning.rows import NO_OWNER, Rows
from gpt2lab.model.gpt import GPT


def places_and_mask(tokens: torch.Tensor, end_of_text: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for rows of ids (B, T) places within their conversations, (B, T), and who attends to whom, (B, T, T).

    A conversation starts at an end of text that follows another (chat_template.py), and at the row's first id. So each
    id of padding is a separate conversation, which attends only to itself.
    """
    is_end = tokens == end_of_text
    is_start = is_end.clone()
    is_start[:, 1:] &= is_end[:, :-1]
    is_start[:, 0] = True
    places = torch.arange(tokens.size(1), device=tokens.device)
    starts = torch.where(is_start, places, 0).cummax(dim=1).values  # (B, T)
    together = starts[:, :, None] == starts[:, None, :]  # (B, T, T)
    return places - starts, together & (places[:, None] >= places)


def hidden_of_rows(model: GPT, tokens: torch.Tensor, end_of_text: int) -> torch.Tensor:
    """Map rows of ids (B, T) to hidden states (B, T, C), as if each conversation were in a separate row."""
    return model.ln_f(model.stream(tokens, *places_and_mask(tokens, end_of_text)))


class PackedGPT(nn.Module):
    """A GPT to train on rows of conversations."""

    def __init__(self, model: GPT, end_of_text: int) -> None:
        super().__init__()
        self.model, self.end_of_text = model, end_of_text

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of ids (B, T) against `targets` (B, T; -1 = not counted), in nats summed over the targets."""
        stream = self.model.stream(tokens, *places_and_mask(tokens, self.end_of_text))
        return self.model.loss_sum(stream, targets)


class RowLoader(Loader):
    """An endless stream of global batches of rows. Every rank holds all rows, so that it can count all targets."""

    def __init__(self, order: Order | Mixture, rows: Rows, plan: BatchPlan, **where: Any) -> None:
        """`where`: rank and device, as of a Loader."""
        no_shards = WindowReader((), context_length=plan.context_length, id_limit=0)
        super().__init__(order, no_shards, plan, **where)
        self._rows = rows

    def fetch(self, first_sample: int) -> GlobalBatch:
        """Read one global batch now; only its answers are targets."""
        plan = self._plan
        samples = np.arange(first_sample, first_sample + plan.samples)
        numbers = self.order.locate(samples)[1] // plan.context_length  # (S,)
        ids = self._rows.ids[numbers]  # (S, T + 1)
        targets = np.where(self._rows.owner[numbers] == NO_OWNER, -1, ids.astype(np.int64))[:, 1:]
        share = plan.samples // plan.world_size
        mine = slice(self._rank * share, (self._rank + 1) * share)
        return self._batch(
            first_sample,
            ids[mine],
            targets[mine],
            num_targets=int((targets >= 0).sum()),
            digest=hash_windows(ids) if self._rank == 0 else None,
        )
