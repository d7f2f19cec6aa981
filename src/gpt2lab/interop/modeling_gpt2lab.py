"""The model of configuration_gpt2lab.py for transformers 5, to be read from top to bottom. MIT license.

Pre-norm blocks around a residual stream, as in GPT-2 (Radford et al. 2019), with the options of the config. It needs
transformers and torch alone. Shapes: B batch, T new positions, S all positions, C channels, H heads, D = C / H.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from .configuration_gpt2lab import GPT2LabConfig


def build_norm(config: GPT2LabConfig) -> nn.Module:
    """Return a norm of the residual stream."""
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(config.n_embd, eps=config.norm_eps)


def rotary_angles(position_ids: Tensor, config: GPT2LabConfig) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, (B, 1, T, D/2) fp32 each, by which positions (B, T) turn the channel pairs of a head."""
    width, device = config.n_embd // config.n_head, position_ids.device
    if config.positions == "half_rotary":
        rates = 1024.0 ** -torch.linspace(0, 1, width // 4, device=device)
        rates = F.pad(rates, (0, width // 4))
    else:
        rates = 10_000.0 ** -(torch.arange(0, width, 2, device=device) / width)
    angles = (position_ids[..., None] * rates)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn queries or keys (B, H, T, D); channel i is paired with channel i + D/2."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


def visible_positions(
    attention_mask: Tensor | None, T: int, past: int, device: torch.device
) -> Tensor:
    """Return which positions each of the T new ones attends to, (B or 1, 1, T, S), true = attends.

    `attention_mask`: (B, S), 0 = padding on either side. Every position attends to itself: padding would otherwise
    attend to nothing, which is no number.
    """
    S = past + T
    queries = torch.arange(past, S, device=device)[:, None]
    keys = torch.arange(S, device=device)
    mask = (keys <= queries)[None, None]
    if attention_mask is not None:
        mask = (mask & attention_mask[:, None, None, :S].bool()) | (keys == queries)
    return mask


class GPT2LabAttention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPT2LabConfig, layer_idx: int) -> None:
        super().__init__()
        self.n_head, self.dropout, self.layer_idx = config.n_head, config.dropout, layer_idx
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.scale, self.qk_norm = config.attention_scale, config.qk_norm
        if self.qk_norm != "none":
            width, has_gain = config.n_embd // config.n_head, self.qk_norm == "rmsnorm"
            self.q_norm = nn.RMSNorm(width, eps=config.norm_eps, elementwise_affine=has_gain)
            self.k_norm = nn.RMSNorm(width, eps=config.norm_eps, elementwise_affine=has_gain)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        cache: Cache | None,
    ) -> Tensor:
        """Map (B, T, C) to (B, T, C). Without a mask the T positions are all there are."""
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in (q, k, v))
        if self.qk_norm != "none":
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        S = T if mask is None else mask.size(-1)
        y = F.scaled_dot_product_attention(
            q,
            k[:, :, :S],  # a static cache has room for more
            v[:, :, :S],
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
        )
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class GPT2LabMLP(nn.Module):
    """Two linear layers around GELU or ReLU squared."""

    def __init__(self, config: GPT2LabConfig) -> None:
        super().__init__()
        self.dropout, self.activation = config.dropout, config.activation
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        x = self.c_fc(x)
        x = F.gelu(x, approximate="tanh") if self.activation == "gelu" else F.relu(x).square()
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class GPT2LabBlock(nn.Module):
    """Attention, then MLP; each reads a normalized copy of the residual stream and adds to it."""

    def __init__(self, config: GPT2LabConfig, layer_idx: int) -> None:
        super().__init__()
        self.ln_1 = build_norm(config)
        self.attn = GPT2LabAttention(config, layer_idx)
        self.ln_2 = build_norm(config)
        self.mlp = GPT2LabMLP(config)

    def forward(self, x: Tensor, *context: Any) -> Tensor:
        """Map (B, T, C) to (B, T, C); `context`: the attention's rotation, mask and cache."""
        x = x + self.attn(self.ln_1(x), *context)
        return x + self.mlp(self.ln_2(x))


class GPT2LabPreTrainedModel(PreTrainedModel):
    """What transformers asks of a model."""

    config_class = GPT2LabConfig
    base_model_prefix = "model"
    _input_embed_layer = "wte"
    _no_split_modules = ["GPT2LabBlock"]  # noqa: RUF012 (transformers declares a list)
    _skip_keys_device_placement = "past_key_values"
    _supports_sdpa = True


class GPT2LabModel(GPT2LabPreTrainedModel):
    """Token ids in, final normalized hidden states out."""

    def __init__(self, config: GPT2LabConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        if config.positions == "learned":
            self.wpe = nn.Embedding(config.context_length, config.n_embd)
        if config.embedding_norm == "on":
            self.ln_e = build_norm(config)
        self.blocks = nn.ModuleList(GPT2LabBlock(config, i) for i in range(config.n_layer))
        self.ln_f = build_norm(config)
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Map ids (B, T) that follow those in `past_key_values` to hidden states (B, T, C).

        `attention_mask`: (B, S), 0 = padding; or (B, 1, T, S) as scaled_dot_product_attention takes it.
        `position_ids`: (B, T); the default does not count padding.
        """
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        T = x.size(1)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        mask, padding = attention_mask, None
        if mask is not None and mask.dim() == 2:
            padding = mask
        if position_ids is None:
            position_ids = torch.arange(past, past + T, device=x.device)[None]
            if padding is not None:
                position_ids = (padding.long().cumsum(-1) - 1).clamp(min=0)[:, past : past + T]
        if padding is not None or (mask is None and past > 0):
            mask = visible_positions(padding, T, past, x.device)
        rotation = None
        if self.config.positions == "learned":
            x = x + self.wpe(position_ids)
        else:
            rotation = rotary_angles(position_ids, self.config)
        if self.config.embedding_norm == "on":
            x = self.ln_e(x)
        x = F.dropout(x, self.config.dropout, self.training)
        states = []
        for block in self.blocks:
            states.append(x)
            x = block(x, rotation, mask, past_key_values)
        x = self.ln_f(x)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*states, x) if output_hidden_states else None,
        )


class GPT2LabForCausalLM(GPT2LabPreTrainedModel, GenerationMixin):
    """Token ids in, logits of the next id out; with labels also their mean loss."""

    _tied_weights_keys = {"lm_head.weight": "model.wte.weight"}  # noqa: RUF012

    def __init__(self, config: GPT2LabConfig) -> None:
        super().__init__(config)
        self.model = GPT2LabModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=config.head == "untied")
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Map ids (B, T) to logits (B, T, V), or of the last `logits_to_keep` positions.

        `labels`: (B, T), shifted here; -100 is left out. `kwargs` are those of transformers' loss.
        """
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(found.last_hidden_state[:, kept])
        if cap := self.config.logit_cap:
            logits = logits.float()
            logits = cap * logits * (logits.square() + cap**2).rsqrt()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=found.past_key_values,
            hidden_states=found.hidden_states,
        )
