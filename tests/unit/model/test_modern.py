"""The options beside GPT-2: each against an independent computation, and on every path that GPT-2 takes."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import launch
from gpt2lab.checkpoint import catalog
from gpt2lab.config import settings
from gpt2lab.config.presets import PRESETS, preset
from gpt2lab.config.schema import ModelConfig
from gpt2lab.config.settings import options_of, read_settings
from gpt2lab.errors import ConfigError
from gpt2lab.model.gpt import Attention, build_model, rotary_angles
from one_process import disturbed
from tiny import MODERN, evaluated, resolved

CPU = torch.device("cpu")
PLAIN = ModelConfig(n_layer=2, n_head=4, n_embd=48, context_length=24, vocab_size=211)
ALL = dataclasses.replace(PLAIN, **MODERN)
SPEEDRUN = {name: getattr(preset("speedrun").model, name) for name in settings.OPTIONS}
EACH = [pytest.param({name: value}, id=name) for name, value in MODERN.items()]
EACH += [
    pytest.param({name: SPEEDRUN[name]}, id=f"{name}={SPEEDRUN[name]}")
    for name in settings.OPTIONS
    if SPEEDRUN[name] != MODERN.get(name)
]
TOGETHER = [pytest.param(MODERN, id="modern"), pytest.param(SPEEDRUN, id="speedrun")]


def ids_of(config: ModelConfig, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, config.vocab_size, (batch, config.context_length), generator=generator)


@pytest.mark.parametrize("option", EACH)
def test_an_option_alone_is_another_model_and_leaves_the_rest_of_the_config_alone(option):
    config = dataclasses.replace(PLAIN, **option)
    ids = ids_of(PLAIN)
    with torch.no_grad():
        plain, other = (build_model(c, seed=1, device=CPU)(ids) for c in (PLAIN, config))
        model = build_model(config, seed=1, device=CPU)
        scores = model.masked_logits(model.hidden(ids))
    assert not torch.equal(plain, other)
    torch.testing.assert_close(scores, other)
    ((name, value),) = option.items()
    assert (options_of(config), options_of(PLAIN)) == (f"{name} {value}", "")


def test_rotary_attention_with_normalized_heads_equals_a_naive_float64_reference():
    """Pairs as complex numbers, each turned by its position times its frequency."""
    config = dataclasses.replace(PLAIN, n_head=3, n_embd=12, positions="rotary", qk_norm="rmsnorm")
    model = disturbed(config)
    layer = model.blocks[0].attn
    assert isinstance(layer, Attention)
    D, T = 4, 9
    x = torch.randn(1, T, 12, generator=torch.Generator().manual_seed(5))
    weights = {n: p.detach().double().numpy() for n, p in layer.named_parameters()}
    qkv = x[0].double().numpy() @ weights["c_attn.weight"].T + weights["c_attn.bias"]

    def turned(heads: np.ndarray, gain: np.ndarray) -> np.ndarray:
        heads = heads / np.sqrt((heads**2).mean(axis=-1, keepdims=True) + 1e-5) * gain
        pairs = heads[:, : D // 2] + 1j * heads[:, D // 2 :]
        frequency = 10_000.0 ** (-np.arange(0, D, 2) / D)
        return pairs * np.exp(1j * np.arange(T)[:, None] * frequency)

    expected = np.zeros((T, 12))
    for h in range(3):
        q, k, v = (qkv[:, part * 12 + h * D : part * 12 + (h + 1) * D] for part in range(3))
        q, k = turned(q, weights["q_norm.weight"]), turned(k, weights["k_norm.weight"])
        for t in range(T):
            scores = (q[t] * k[: t + 1].conj()).real.sum(axis=1) / math.sqrt(D)
            chances = np.exp(scores - scores.max())
            expected[t, h * D : (h + 1) * D] = (chances / chances.sum()) @ v[: t + 1]
    expected = expected @ weights["c_proj.weight"].T + weights["c_proj.bias"]
    with torch.no_grad():
        ours = layer(x, rotation=rotary_angles(torch.arange(T), config))[0].numpy()
    assert np.abs(expected).max() > 0.3
    np.testing.assert_allclose(ours, expected, atol=5e-6)


def test_rmsnorm_and_relu2_are_what_they_are_called():
    model = disturbed(ALL)
    x = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(5))
    exact = x.double()
    with torch.no_grad():
        gain = model.ln_f.weight.double()
        norm = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain
        torch.testing.assert_close(model.ln_f(x).double(), norm, atol=1e-5, rtol=1e-5)
        mlp = model.blocks[0].mlp
        inner = exact @ mlp.c_fc.weight.double().T + mlp.c_fc.bias.double()
        outer = inner.clamp(min=0) ** 2 @ mlp.c_proj.weight.double().T + mlp.c_proj.bias.double()
        torch.testing.assert_close(mlp(x).double(), outer, atol=1e-4, rtol=1e-4)
    assert not hasattr(model, "wpe")


@pytest.mark.parametrize("option", [pytest.param({}, id="gpt2"), *EACH, *TOGETHER])
@pytest.mark.parametrize("cuts", [[1] * 24, [5, 1, 1, 17]])
def test_pieces_through_the_cache_give_the_hidden_states_of_the_whole(option, cuts):
    model = disturbed(dataclasses.replace(PLAIN, **option)).eval()
    ids = ids_of(PLAIN)
    with torch.no_grad():
        whole, caches = model.hidden(ids), model.new_caches()
        parts = [model.extend(piece, caches) for piece in ids.split(cuts, dim=1)]
    assert (torch.cat(parts, dim=1) - whole).abs().max() <= 1e-5 * whole.abs().max()


@pytest.mark.parametrize("option", [*EACH, *TOGETHER])
def test_texts_that_share_a_row_do_not_see_each_other(option):
    """As HellaSwag packs them: positions begin anew, and the mask is block by block."""
    model = disturbed(dataclasses.replace(PLAIN, **option)).eval()
    ids = ids_of(PLAIN, batch=1)
    first, second = ids[:, :9], ids[:, 9:]
    owner = torch.tensor([0] * 9 + [1] * 15)
    mask = (owner[:, None] == owner) & torch.ones(24, 24, dtype=torch.bool).tril()
    positions = torch.cat([torch.arange(9), torch.arange(15)])[None]
    with torch.no_grad():
        packed = model.ln_f(model.stream(ids, positions, mask[None]))
        alone = torch.cat([model.hidden(first), model.hidden(second)], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("modern-")])
def test_a_modern_preset_has_the_sizes_of_its_gpt2(name):
    twin = {"modern-small": "gpt2"}.get(name, name.replace("modern", "gpt2"))
    modern, plain = preset(name).model, preset(twin).model
    for size in ("n_layer", "n_head", "n_embd", "context_length", "vocab_size"):
        assert getattr(modern, size) == getattr(plain, size)
    assert (options_of(plain), preset(name).optim.optimizer) == ("", "normuon")
    assert preset(name).optim.max_lr > 5 * preset(twin).optim.max_lr  # GPT-2's are far too low


@pytest.fixture(scope="module", params=["modern-nano", "speedrun"])
def run(tiny_run, request) -> Path:
    """Return the folder of a finished run of a tiny model of a preset; treat as read-only."""
    return tiny_run(model=request.param, max_steps=6, eval_freq=3, checkpoint_freq=3).path


def test_its_architecture_is_fixed_and_a_new_run_can_begin_with_it(run, tiny_data, tmp_path):
    """It is evaluated afterwards with the trainer's own loss."""
    assert evaluated(run.name, run.parent).val_loss == launch.events(run, "eval")[-1]["val_loss"]
    with pytest.raises(ConfigError, match=r"another architecture: positions .*rotary -> learned"):
        resume = [f"--checkpoint_dir={run.parent}", "--resume=latest", "--positions=learned"]
        resolved(resume)
    fresh = [f"--init_from={run}", f"--data_dir={tiny_data}", f"--checkpoint_dir={tmp_path}"]
    config = resolved([*fresh, "--max_steps=2"]).config
    assert options_of(config.model) == options_of(preset(config.model.model).model) != ""
    with pytest.raises(ConfigError, match="norm layernorm does not fit"):
        resolved([*fresh, "--norm=layernorm"])


def test_settings_saved_before_there_were_options_mean_gpt2(run):
    infos, _ = catalog.list_checkpoints(run)
    saved = dict(infos[-1].manifest["config"])
    assert json.loads((run / "config.json").read_text())["positions"] != "learned"
    for name in [*settings.OPTIONS, "optimizer", "muon_lr", "head_lr", "chosen"]:
        del saved[name]
    config = read_settings(saved)
    assert (options_of(config.model), config.optim.optimizer) == ("", "adamw")
