"""GPT-2, the whole model on one scroll.

Radford et al. 2019: pre-LayerNorm blocks, learned positions, tanh-GELU, biases everywhere, head tied to the token
embedding. Each option of ModelConfig changes one of these alone; at its default the model is GPT-2.
Shapes: B batch, T time, C channels (n_embd), H heads, D = C / H head width, V vocabulary rows.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from gpt2lab.config.schema import ModelConfig
from gpt2lab.model.attention import attend
from gpt2lab.model.loss import cross_entropy_sum, has_compiled_form, head_cross_entropy_sum
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS


class Cache:
    """One block's keys and values of all positions so far, for text that grows at its end."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add those of the next T positions, (B, H, T, D) each, and return those of all."""
        if self.length == 0:
            B, H, _, D = k.shape
            self.k, self.v = (x.new_empty(B, H, self.capacity, D) for x in (k, v))
        end = self.length + k.size(2)
        self.k[:, :, self.length : end], self.v[:, :, self.length : end] = k, v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, (T, D/2) or (B, 1, T, D/2)


def rotation_of(positions: torch.Tensor, width: int) -> Rotation:
    """Return how far positions (T,) or (B, T) turn the D/2 pairs of channels of a head of width D.

    Source: Su et al. 2021 (RoPE, arXiv:2104.09864), equation 15.
    """
    pairs = torch.arange(0, width, 2, device=positions.device) / width
    angles = positions[..., None] * 10_000.0**-pairs  # (T, D/2) or (B, T, D/2)
    if angles.dim() == 3:
        angles = angles[:, None]  # the same for all heads
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn queries or keys (B, H, T, D): channel i is paired with channel i + D/2."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)  # each (B, H, T, D/2)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


def build_norm(config: ModelConfig) -> nn.Module:
    """Return a norm of the residual stream."""
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(config.n_embd, eps=1e-5)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.qk_norm = config.qk_norm
        if self.qk_norm == "rmsnorm":
            self.q_norm = nn.RMSNorm(config.n_embd // config.n_head, eps=1e-5)
            self.k_norm = nn.RMSNorm(config.n_embd // config.n_head, eps=1e-5)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """Map (B, T, C) to (B, T, C); position t sees positions up to t, or where `mask` (B, T, T) is true.

        With a cache there are S positions in all, T of them new; the mask is then (B, T, S).
        """
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)  # each (B, T, C)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        k = k.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        v = v.view(B, T, self.n_head, -1).transpose(1, 2)  # (B, H, T, D)
        if self.qk_norm == "rmsnorm":
            q, k = (norm(x.float()).type_as(v) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = cache.append(k, v)  # (B, H, S, D)
        dropout = self.dropout if self.training else 0.0
        allowed = None if mask is None else mask[:, None]  # (B, 1, T, T), the same for all heads
        y = attend(q, k, v, allowed, dropout)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)  # (B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers around GPT-2's tanh approximation of GELU, or around ReLU squared."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout, self.activation = config.dropout, config.activation
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, C) to (B, T, C), each position alone."""
        x = self.c_fc(x)  # (B, T, 4C)
        x = F.gelu(x, approximate="tanh") if self.activation == "gelu" else F.relu(x).square()
        return F.dropout(self.c_proj(x), self.dropout, self.training)  # (B, T, C)


class Block(nn.Module):
    """Attention, then MLP, each on a normalised copy and added back to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = build_norm(config)
        self.attn = Attention(config)
        self.ln_2 = build_norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """Map (B, T, C) to (B, T, C)."""
        x = x + self.attn(self.ln_1(x), mask, cache, rotation)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Token ids in, summed loss or logits out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)  # also the head: tied
        if config.positions == "learned":
            self.wpe = nn.Embedding(config.context_length, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = build_norm(config)

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        caches: list[Cache] | None = None,
    ) -> torch.Tensor:
        """Map ids (B, T) to the last normalised hidden states (B, T, C).

        `positions` (B, T) and `mask` (B, T, T; true = sees) let several texts lie in one row; left out, a row is one
        text.
        """
        if positions is None:
            positions = torch.arange(tokens.size(1), device=tokens.device)  # (T,)
        x, rotation = self.wte(tokens), None  # (B, T, C)
        if self.config.positions == "learned":
            x = x + self.wpe(positions)  # (B, T, C)
        else:
            rotation = rotation_of(positions, self.config.n_embd // self.config.n_head)
        x = F.dropout(x, self.config.dropout, self.training)
        for index, block in enumerate(self.blocks):
            x = block(x, mask, caches[index] if caches else None, rotation)
        return self.ln_f(x)

    def extend(self, tokens: torch.Tensor, caches: list[Cache]) -> torch.Tensor:
        """Map ids (B, T) that follow those in the caches to hidden states (B, T, C), and add them to the caches.

        The same numbers as `hidden` gives for the whole text, up to rounding. `caches` come from `new_caches`.
        """
        begin, T = caches[0].length, tokens.size(1)
        positions = torch.arange(begin, begin + T, device=tokens.device)  # (T,)
        mask = None
        if begin > 0:  # the new see all before them, and among themselves those up to each
            seen = torch.arange(begin + T, device=tokens.device)  # (S,)
            mask = (positions[:, None] >= seen)[None]  # (1, T, S)
        return self.hidden(tokens, positions, mask, caches)

    def new_caches(self) -> list[Cache]:
        """Return an empty cache for each block."""
        return [Cache(self.config.context_length) for _ in self.blocks]

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map ids (B, T) to scores of the next id (B, T, V)."""
        return self.head(self.hidden(tokens))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states (..., C) to scores (..., V)."""
        return F.linear(hidden, self.wte.weight)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states (..., C) to scores (..., V) of the real ids; padding ids are out of the race at -inf."""
        scores = self.head(hidden)
        scores[..., NUM_TOKENS:] = -math.inf
        return scores

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of ids `tokens` (B, T) against `targets` (B, T), in nats summed over the targets."""
        if has_compiled_form(tokens.device):
            return head_cross_entropy_sum(self.hidden(tokens), self.wte.weight, targets)
        return cross_entropy_sum(self.logits(tokens), targets)


def empty_model(config: ModelConfig) -> GPT:
    """Build a GPT on the CPU whose weights hold nothing yet."""
    with torch.device("meta"):  # no memory, no random numbers
        model = GPT(config)
    assert not list(model.buffers()), "a buffer would be left uninitialised by to_empty"
    return model.to_empty(device="cpu")


def build_model(config: ModelConfig, *, seed: int, device: torch.device) -> GPT:
    """Build a GPT whose weights depend on the seed alone, not on world, device or library defaults.

    Matrices and token embedding N(0, 0.02), positions N(0, 0.01), projections into the residual stream scaled by
    1 / sqrt(2 n_layer), biases 0, norms 1. Source: Radford et al. 2019, section 2.3, and OpenAI's released code.
    """
    model = empty_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:  # a norm's gain
                parameter.fill_(1.0)
            else:
                std = 0.01 if name == "wpe.weight" else 0.02
                if name.endswith("c_proj.weight"):
                    std /= math.sqrt(2 * config.n_layer)
                parameter.normal_(0.0, std, generator=generator)
    return model.to(device)
