"""GPT-2: the full model in one file, to be read from top to bottom.

Radford et al. 2019: pre-LayerNorm blocks, learned positions, tanh-GELU, biases everywhere, head tied to the token
embedding. Each option of ModelConfig changes one of these; with all defaults the model is GPT-2.
Shapes: B batch, T time, C channels (n_embd), H heads, D = C / H head width, V vocabulary rows, S keys (T or more).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt2lab.config.schema import ModelConfig
from gpt2lab.model.loss import (
    Kernel,
    cross_entropy_sum,
    head_cross_entropy_sum,
    padding_bias,
    soft_cap,
    token_losses,
)

# Size of the fp32 logits that an evaluation holds at a time; their log-softmax takes as much again.
LOGITS_BYTES = 2**28
_EMBEDDINGS = ("wte.weight", "wpe.weight")

RotaryAngles = tuple[Tensor, Tensor]  # cosines and sines, (T, D/2) or (B, 1, T, D/2)


def rotary_angles(positions: Tensor, config: ModelConfig) -> RotaryAngles:
    """Return cosine and sine of the angles by which positions (T,) or (B, T) rotate a head's D/2 channel pairs.

    Source: Su et al. 2021 (RoPE, arXiv:2104.09864), equation 15. With half_rotary only the first half of the pairs
    rotates, by 1 to 1/1024 radians a token: modded-nanogpt's train_gpt_simple.py.
    """
    width, device = config.n_embd // config.n_head, positions.device  # D
    if config.positions == "half_rotary":
        rates = 1024.0 ** -torch.linspace(0, 1, width // 4, device=device)
        rates = F.pad(rates, (0, width // 4))
    else:
        rates = 10_000.0 ** -(torch.arange(0, width, 2, device=device) / width)
    angles = positions[..., None] * rates  # (T, D/2) or (B, T, D/2)
    if angles.dim() == 3:
        angles = angles[:, None]  # the same for all heads
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, rotation: RotaryAngles) -> Tensor:
    """Rotate queries or keys (B, H, T, D); channel i is paired with channel i + D/2."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)  # each (B, H, T, D/2)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


def build_norm(config: ModelConfig) -> nn.Module:
    """Return a norm of the residual stream: LayerNorm, or RMSNorm without bias."""
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(config.n_embd, eps=config.norm_eps)


class Linear(nn.Linear):
    """torch's linear layer; compiled for a GPU, its backward pass reads less memory, and sums the bias in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, F)."""
        if torch.compiler.is_compiling() and x.is_cuda and x.dim() == 3:
            y: Tensor = SumsBiasByRow.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
            return y
        return super().forward(x)


class SumsBiasByRow(torch.autograd.Function):
    """A linear layer that sums the gradient of its bias over T, then over B.

    autograd sums B * T rows at once. Inductor splits so long a sum into a separate kernel, which reads the rows from
    memory again; a sum over T is fused with the kernel that writes them (GELU's backward pass, the joining of q, k, v).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Map x (B, T, C), weight (F, C) and bias (F,) to (B, T, F)."""
        y = F.linear(x, weight, bias)
        ctx.save_for_backward(x.to(y.dtype), weight)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of x, of bias and, unless it is frozen, of weight."""
        x, weight = ctx.saved_tensors
        of_x = (grad @ weight.to(grad.dtype)).to(ctx.dtype)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (grad.flatten(0, 1).t() @ x.flatten(0, 1)).to(weight.dtype)
        return of_x, of_weight, grad.sum(1, dtype=torch.float32).sum(0)


class KVCache:
    """One block's keys and values of all positions so far, to generate text token by token."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of the next T positions, (B, H, T, D); return those of all, (B, H, S, D)."""
        if self.length == 0:
            B, H, _, D = k.shape
            self.k, self.v = (x.new_empty(B, H, self.capacity, D) for x in (k, v))
        end = self.length + k.size(2)
        self.k[:, :, self.length : end], self.v[:, :, self.length : end] = k, v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


# With longer contexts, keeping every layer's (T, T) weights for the backward pass takes too much memory.
_MATMUL_UP_TO = 512


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float | None = None
) -> Tensor:
    """Map queries (B, H, T, D) and keys and values (B, H, S, D) to (B, H, T, D).

    Position t attends to positions up to t, or to those where `mask` (B, 1, T, S) is true; a single query is the last
    position and attends to all. `scale`: of the scores, default 1 / sqrt(D). A compiled CPU step uses a form that is
    faster on CPUs, equal up to rounding; all else uses torch's function, so --compile off is the plain reference.
    """
    is_plain = mask is None and dropout == 0.0 and q.size(2) == k.size(2) <= _MATMUL_UP_TO
    if torch.compiler.is_compiling() and q.device.type == "cpu" and is_plain:
        return causal_by_matmul(q, k, v, scale)
    is_causal = mask is None and q.size(2) > 1
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, dropout_p=dropout, scale=scale
    )


def causal_by_matmul(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Return causal attention of (B, H, T, D) as two batched matrix products around a softmax.

    torch's flash kernel for CPUs makes little use of the fast matrix library; these two products do: at T = 256 they
    take a third of its time in bf16, half to nine tenths in fp32. In bf16 they round the scores: see docs/training.md.
    """
    B, H, T, D = q.shape
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    future = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    scale = 1 / math.sqrt(D) if scale is None else scale
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=scale)  # (B * H, T, T)
    return torch.bmm(scores.softmax(dim=-1), v).view(B, H, T, D)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.scale = config.attention_scale
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = Linear(config.n_embd, config.n_embd)
        self.qk_norm = config.qk_norm
        if self.qk_norm != "none":
            width, has_gain = config.n_embd // config.n_head, self.qk_norm == "rmsnorm"
            self.q_norm = nn.RMSNorm(width, eps=config.norm_eps, elementwise_affine=has_gain)
            self.k_norm = nn.RMSNorm(width, eps=config.norm_eps, elementwise_affine=has_gain)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        rotation: RotaryAngles | None = None,
    ) -> Tensor:
        """Map (B, T, C) to (B, T, C); position t attends up to t, or where `mask` (B, T, S) is true.

        S is T, or with a cache the number of all positions, the last T of them new.
        """
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)  # each (B, T, C)
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in (q, k, v))  # (B, H, T, D)
        if self.qk_norm != "none":
            q, k = (norm(x.float()).type_as(v) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        if rotation is not None:
            q, k = apply_rotary(q, rotation), apply_rotary(k, rotation)
        if cache is not None:
            k, v = cache.append(k, v)  # (B, H, S, D)
        dropout = self.dropout if self.training else 0.0
        if mask is not None:
            mask = mask[:, None]  # (B, 1, T, S), the same for all heads
        y = attend(q, k, v, mask, dropout, self.scale)  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)  # (B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers around GPT-2's tanh approximation of GELU, or around ReLU squared."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout, self.activation = config.dropout, config.activation
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C), each position alone."""
        x = self.c_fc(x)  # (B, T, 4C)
        x = F.gelu(x, approximate="tanh") if self.activation == "gelu" else F.relu(x).square()
        return F.dropout(self.c_proj(x), self.dropout, self.training)  # (B, T, C)


class Block(nn.Module):
    """Attention, then MLP; each reads a normalized copy of the residual stream and adds to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = build_norm(config)
        self.attn = Attention(config)
        self.ln_2 = build_norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        rotation: RotaryAngles | None = None,
    ) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        x = x + self.attn(self.ln_1(x), mask, cache, rotation)
        return x + self.mlp(self.ln_2(x))


def embedding(rows: int, width: int) -> nn.Embedding:
    """Return an embedding with uninitialized weights (rows, width).

    The constructor's own random numbers would be discarded, and on the meta device they import torch.compile's tracer.
    """
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class GPT(nn.Module):
    """Token ids in, summed loss or logits out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # Of the residual stream under bf16 autocast; auto = bf16 on a GPU, where reading and writing it takes time.
        self.residual_dtype: Literal["auto", "fp32", "bf16"] = "auto"
        self.loss_kernel: Kernel | None = None  # of compiled steps; see loss_kernel.py
        self.wte = embedding(config.vocab_size, config.n_embd)  # also the head if that is tied
        if config.positions == "learned":
            self.wpe = embedding(config.context_length, config.n_embd)
        if config.embedding_norm == "on":
            self.ln_e = build_norm(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = build_norm(config)
        if config.head == "untied":
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size)

    def embed(self, tokens: Tensor, positions: Tensor | None) -> tuple[Tensor, RotaryAngles | None]:
        """Map ids (B, T) to the first residual stream (B, T, C), and their positions to the blocks' rotation."""
        if positions is None:
            positions = torch.arange(tokens.size(1), device=tokens.device)  # (T,)
        x, rotation = self.wte(tokens), None  # (B, T, C)
        if self.config.positions == "learned":
            x = x + self.wpe(positions)  # (B, T, C)
        else:
            rotation = rotary_angles(positions, self.config)
        if self.config.embedding_norm == "on":
            x = self.ln_e(x)
        rounds = self.residual_dtype == "bf16" or (self.residual_dtype == "auto" and x.is_cuda)
        if rounds and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x if dtype is torch.float16 else x.to(dtype)  # norms still compute in fp32
        return F.dropout(x, self.config.dropout, self.training), rotation

    def stream(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        caches: list[KVCache] | None = None,
    ) -> Tensor:
        """Map ids (B, T) to the residual stream (B, T, C) after the last block.

        `positions` (B, T) and `mask` (B, T, S; true = attends) allow several texts in one row; the default is one.
        """
        x, rotation = self.embed(tokens, positions)
        for index, block in enumerate(self.blocks):
            x = block(x, mask, caches[index] if caches else None, rotation)
        return x

    def hidden(self, tokens: Tensor) -> Tensor:
        """Map ids (B, T), one text a row, to the final normalized hidden states (B, T, C)."""
        return self.ln_f(self.stream(tokens))

    def extend(self, tokens: Tensor, caches: list[KVCache]) -> Tensor:
        """Map ids (B, T) that follow those in the caches to hidden states (B, T, C), and extend the caches.

        Equals `hidden` of the full text, up to rounding. `caches` come from `new_caches`.
        """
        begin, T = caches[0].length, tokens.size(1)
        positions = torch.arange(begin, begin + T, device=tokens.device)  # (T,)
        mask = None
        if begin > 0 and T > 1:
            seen = torch.arange(begin + T, device=tokens.device)  # (S,)
            mask = (positions[:, None] >= seen)[None]  # (1, T, S)
        return self.ln_f(self.stream(tokens, positions, mask, caches))

    def new_caches(self) -> list[KVCache]:
        """Return an empty cache for each block."""
        return [KVCache(self.config.context_length) for _ in self.blocks]

    @property
    def head_weights(self) -> tuple[Tensor, Tensor | None]:
        """The head's matrix (V, C) and bias (V,), if it has one."""
        if self.config.head == "tied":
            return self.wte.weight, None
        return self.lm_head.weight, self.lm_head.bias

    def head(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., C) to logits (..., V)."""
        return soft_cap(F.linear(hidden, *self.head_weights), self.config.logit_cap)

    def masked_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states (..., C) to logits (..., V); those of padding ids are -inf."""
        weight, bias = self.head_weights
        mask = padding_bias(weight, self.config.num_tokens)
        if bias is None and not self.config.logit_cap:
            return F.linear(hidden, weight, mask)
        logits = self.head(hidden)
        return logits if mask is None else logits + mask

    def losses_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each target in nats, (...) float32, given its hidden state (..., C); 0 for target -1.

        For evaluation: logits are computed for some rows at a time. Those of 64 x 1,024 targets would take 13 GB.
        """
        rows, flat = hidden.flatten(0, -2), targets.flatten()  # (N, C), (N,)
        parts = math.ceil(4 * self.config.vocab_size * len(flat) / LOGITS_BYTES)
        losses = [
            token_losses(self.masked_logits(some), wanted)
            for some, wanted in zip(rows.chunk(parts), flat.chunk(parts), strict=True)
        ]
        return torch.cat(losses).view_as(targets)

    def loss_sum(self, stream: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of `targets` (B, T; -1 = not counted) in nats, summed, given the last `stream` (B, T, C)."""
        if torch.compiler.is_compiling():
            (weight, bias), config = self.head_weights, self.config
            hidden, more = self.ln_f(stream), (config.num_tokens, bias, config.logit_cap)
            return head_cross_entropy_sum(hidden, weight, targets, *more, self.loss_kernel)
        # No variable holds the fp32 hidden states, so they are freed once the head has its bf16 copy.
        return cross_entropy_sum(self.masked_logits(self.ln_f(stream)), targets)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss of ids `tokens` (B, T) against `targets` (B, T), in nats summed over the targets.

        Without targets: logits of the next id, (B, T, V).
        """
        if targets is None:
            return self.head(self.hidden(tokens))
        return self.loss_sum(self.stream(tokens), targets)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and back into the mode that it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def empty_model(config: ModelConfig) -> GPT:
    """Build a GPT on the CPU with uninitialized weights."""
    with torch.device("meta"):  # no memory, no random numbers
        model = GPT(config)
    assert not list(model.buffers()), "a buffer would stay on the meta device"
    for module in model.modules():  # as to_empty, which imports a computer algebra system
        for name, parameter in list(module.named_parameters(recurse=False)):
            weights = torch.empty(parameter.shape, device="cpu")
            setattr(module, name, nn.Parameter(weights))
    return model


def build_model(
    config: ModelConfig,
    *,
    seed: int,
    device: torch.device,
    weight_init: Literal["gpt2", "fan_in"] = "gpt2",
) -> GPT:
    """Build a GPT whose weights depend on the seed alone, not on world size, device or library defaults.

    gpt2: matrices and token embedding N(0, 0.02), positions N(0, 0.01), projections into the residual stream scaled by
    1 / sqrt(2 n_layer), biases 0, norms 1. Source: Radford et al. 2019, section 2.3, and OpenAI's released code.
    fan_in: embeddings N(0, 1), projections and an untied head 0, matrices N(0, sqrt(0.33 / fan-in)). Source:
    modded-nanogpt's train_gpt_simple.py.
    """
    model = empty_model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_projection = name.endswith("c_proj.weight")
            if name.endswith("bias"):
                std = 0.0
            elif parameter.dim() == 1:  # a norm's gain
                parameter.fill_(1.0)
                continue
            elif weight_init == "fan_in":
                std = 1.0 if name in _EMBEDDINGS else math.sqrt(0.33 / parameter.size(1))
                std *= not (is_projection or name == "lm_head.weight")
            else:
                std = 0.01 if name == "wpe.weight" else 0.02
                std /= math.sqrt(2 * config.n_layer) if is_projection else 1.0
            parameter.normal_(0.0, std, generator=generator) if std else parameter.zero_()
    return model.to(device)
