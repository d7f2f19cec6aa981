"""Several conversations in one row of ids, none of which sees another."""

from __future__ import annotations

import torch
from torch import nn

from gpt2lab.model.gpt import GPT
from gpt2lab.model.loss import cross_entropy_sum, has_compiled_form, head_cross_entropy_sum
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT


def beginnings(tokens: torch.Tensor) -> torch.Tensor:
    """Return for each of ids (B, T) the place in its row where its conversation begins, (B, T) int64.

    One begins at <|endoftext|> after <|endoftext|> (template.py), and at the row's first id. So each id of padding is a
    conversation of its own, which sees itself alone.
    """
    is_end = tokens == END_OF_TEXT
    begins = is_end.clone()
    begins[:, 1:] &= is_end[:, :-1]
    begins[:, 0] = True
    places = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    return torch.where(begins, places, 0).cummax(dim=1).values


def hidden_of_rows(model: GPT, tokens: torch.Tensor) -> torch.Tensor:
    """Map rows of ids (B, T) to hidden states (B, T, C), as if each conversation stood in a row of its own."""
    begins = beginnings(tokens)
    places = torch.arange(tokens.size(1), device=tokens.device)
    together = begins[:, :, None] == begins[:, None, :]  # (B, T, T)
    mask = together & (places[:, None] >= places)
    return model.hidden(tokens, places - begins, mask)


class PackedGPT(nn.Module):
    """A GPT that is trained on rows of conversations."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of ids (B, T) against `targets` (B, T; -1 = not counted), in nats summed over the targets."""
        if has_compiled_form(tokens.device):
            hidden = hidden_of_rows(self.model, tokens)
            return head_cross_entropy_sum(hidden, self.model.wte.weight, targets)
        return cross_entropy_sum(self.model.head(hidden_of_rows(self.model, tokens)), targets)
