"""The network: sizes, causality, initial weights; test_hf_weights.py compares it with transformers' GPT-2."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from gpt2lab.config.presets import preset
from gpt2lab.config.schema import Config, ModelConfig, SystemConfig
from gpt2lab.config.settings import override
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.model.counts import count_parameters
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.model.loss import head_cross_entropy_sum
from gpt2lab.tokenizers.gpt2 import NUM_TOKENS
from one_process import disturbed

CPU = torch.device("cpu")
SMALL = ModelConfig(n_layer=3, n_head=4, n_embd=48, context_length=24, vocab_size=211)


def random_ids(config: ModelConfig, *, batch: int = 2, seed: int = 0) -> torch.Tensor:
    """Return ids (batch, context_length)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, config.context_length)
    return torch.randint(0, config.vocab_size, shape, generator=generator)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        *(("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080)),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_gpt2_sizes_at_the_published_vocabulary_equal_the_released_models(name, parameters):
    config = override(preset(name), {"vocab_size": 50257}).model
    with torch.device("meta"):
        model = GPT(config)
    assert (config.context_length, sum(p.numel() for p in model.parameters())) == (1024, parameters)
    assert count_parameters(config) == parameters


def test_loss_at_a_position_has_no_gradient_from_later_inputs():
    model = disturbed(SMALL)
    inputs: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, arguments: object, output: torch.Tensor) -> None:
        output.retain_grad()
        inputs.append(output)

    model.wte.register_forward_hook(keep)
    t = 10
    targets = torch.full((2, SMALL.context_length), -1)
    targets[:, t] = random_ids(SMALL, seed=3)[:, t]
    model(random_ids(SMALL), targets).backward()
    gradient = inputs[0].grad
    strength = gradient.abs().amax(dim=(0, 2))  # (T,)
    assert (strength[: t + 1] > 0).all(), "each position up to t must matter"
    assert (strength[t + 1 :] == 0).all(), "no later position may"


def test_initial_weights_have_gpt2s_statistics():
    config = ModelConfig(n_layer=8, n_head=4, n_embd=128, context_length=256, vocab_size=2048)
    for name, value in build_model(config, seed=7, device=CPU).named_parameters():
        if name.endswith("bias"):
            assert (value == 0).all(), name
        elif value.dim() == 1:
            assert (value == 1).all(), name
        else:
            std = {"wpe.weight": 0.01}.get(name, 0.02)
            if name.endswith("c_proj.weight"):
                std = 0.02 / math.sqrt(2 * 8)
            sigma = std / math.sqrt(2 * value.numel())  # of an estimated standard deviation
            assert abs(value.std().item() - std) < 5 * sigma, name
            assert abs(value.mean().item()) < 5 * std / math.sqrt(value.numel()), name
    config = replace(SMALL, head="untied")
    assert not build_model(config, seed=7, device=CPU, weight_init="fan_in").lm_head.weight.any()
    assert SMALL.id_limit == 211, "fewer rows than a tokenizer has ids"


def test_initial_weights_are_a_function_of_the_seed_alone():
    """And leave the global generator as it was."""
    states = []
    for global_seed, default in ((1, "cpu"), (2, "meta")):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        with torch.device(default):
            states.append(build_model(SMALL, seed=1337, device=CPU).state_dict())
        assert torch.equal(torch.get_rng_state(), before)
    other = build_model(SMALL, seed=1338, device=CPU).state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["wte.weight"], other["wte.weight"])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_residual_stream_in_bf16_is_rounded_and_that_in_fp32_is_not(positions):
    model = build_model(replace(SMALL, positions=positions), seed=1, device=CPU)
    ids, strategy = random_ids(SMALL), Strategy(Runtime(), SystemConfig(dtype="bf16"))
    seen: list[torch.dtype] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    losses = {}
    for dtype in ("auto", "fp32", "bf16"):
        model.residual_dtype = dtype  # type: ignore[assignment]
        with torch.no_grad(), strategy.autocast():
            losses[dtype] = model(ids[:, :-1], ids[:, 1:]).item() / ids[:, 1:].numel()
    L = SMALL.n_layer
    assert seen == [torch.float32] * 2 * L + [torch.bfloat16] * L
    assert losses["auto"] == losses["fp32"] != losses["bf16"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=1e-3)


def test_dropout_acts_in_training_mode_only():
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": 16}
    config = ModelConfig(**shape, vocab_size=97, dropout=0.3)
    model, ids = build_model(config, seed=1, device=CPU), random_ids(config)
    without = override(Config(), {**vars(config), "dropout": 0.0})
    plain = build_model(without.model, seed=1, device=CPU)
    with torch.no_grad():
        model.train()
        torch.manual_seed(0)
        first, second = model(ids), model(ids)
        torch.manual_seed(0)
        first_again = model(ids)
        model.eval()
        calm, calm_again = model(ids), model(ids)
        reference = plain.train()(ids)
    assert not torch.equal(first, second)
    assert torch.equal(first, first_again), "the masks come from torch's generator alone"
    assert torch.equal(calm, calm_again)
    assert torch.equal(calm, reference), "evaluation equals a model without dropout"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("head", [{}, {"head": "untied", "logit_cap": 15.0}])
@pytest.mark.parametrize(("rows", "count"), [(50304, NUM_TOKENS), (384, 300)])
def test_padding_rows_take_no_part_in_the_training_loss(chunked, head, rows, count):
    """One rule for training and validation: the softmax is over the tokenizer's ids alone."""
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "context_length": 8}
    config = ModelConfig(**shape, vocab_size=rows, num_tokens=count, **head)
    model = disturbed(config)
    ids = torch.randint(0, count, (2, 9), generator=torch.Generator().manual_seed(3))
    tokens, targets = ids[:, :-1], ids[:, 1:]
    if chunked:
        (weight, bias), hidden = model.head_weights, model.hidden(tokens)
        loss = head_cross_entropy_sum(hidden, weight, targets, count, bias, config.logit_cap)
    else:
        loss = model(tokens, targets)
    real = model.head(model.hidden(tokens))[..., :count]
    expected = F.cross_entropy(real.flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    gradient = model.head_weights[0].grad
    assert not gradient[count:].any()
    assert gradient[:count].any(dim=1).all()
