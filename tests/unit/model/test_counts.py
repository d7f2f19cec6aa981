"""Parameters and FLOPs in closed form, exactly those of the built model and of torch's FLOP counter."""

import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gpt2lab.config.presets import PRESETS, preset
from gpt2lab.config.schema import Config, ModelConfig
from gpt2lab.config.settings import override
from gpt2lab.model import counts
from gpt2lab.model.counts import count_parameters, flops_per_token, training_flops_per_token
from gpt2lab.model.gpt import GPT
from gpt2lab.model.lora import add_lora


def random_shapes(count: int) -> list[ModelConfig]:
    draw = random.Random(20)
    return [
        ModelConfig(
            n_layer=draw.randint(1, 6),
            n_head=(heads := draw.randint(1, 6)),
            n_embd=heads * draw.choice([8, 24, 32, 64]),
            context_length=draw.randint(1, 300),
            vocab_size=draw.randint(2, 60_000),
            positions=draw.choice(["learned", "rotary"]),
            norm=draw.choice(["layernorm", "rmsnorm"]),
            qk_norm=draw.choice(["none", "rmsnorm"]),
            activation=draw.choice(["gelu", "relu2"]),
        )
        for _ in range(count)
    ]


SHAPES = {name: preset(name).model for name in PRESETS}
SHAPES |= {f"random {i}": model for i, model in enumerate(random_shapes(20))}


@pytest.mark.parametrize("name", SHAPES)
def test_counts_are_those_of_the_built_model(name):
    """On the meta device: on a CPU the counter does not see attention."""
    config, B = SHAPES[name], 2
    with torch.device("meta"):
        model = GPT(config)
        ids = torch.zeros(B, config.context_length, dtype=torch.int64)
    assert count_parameters(config) == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).backward()
    assert flops_per_token(config) * B * config.context_length == counter.get_total_flops()


@pytest.mark.parametrize(
    "targets", ["c_attn,c_fc,c_proj", "mlp.c_proj", "blocks.1.attn.c_attn", "blocks.11.mlp.c_proj"]
)
def test_adapters_are_counted_and_spare_the_gradients_of_the_matrices(targets):
    config = override(Config(), {"lora_r": 8, "lora_targets": targets, "context_length": 256})
    with torch.device("meta"):
        model = GPT(config.model)
        add_lora(model, config.tuning)
        ids = torch.zeros(1, 256, dtype=torch.int64)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert counts.count_adapters(config.model, config.tuning) == trained
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).backward()
    assert training_flops_per_token(config) * 256 == counter.get_total_flops()


def test_124m_costs_what_everybody_computes():
    config = preset("gpt2").model
    assert count_parameters(config) == 124_475_904
    assert counts.count_matmul_parameters(config) == 123_568_128
    assert round(flops_per_token(config) / 1e6, 1) == 854.7
