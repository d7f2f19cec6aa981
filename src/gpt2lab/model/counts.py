"""Sizes of a model: in closed form (parameters, floating-point operations, bytes), and in the header of a weights file.

The dry run, the planner, the MFU column and the trainer call these same functions. No torch.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from safetensors import SafetensorError, safe_open

from gpt2lab.config.schema import Config, ModelConfig, TuningConfig
from gpt2lab.errors import CheckpointError, ConfigError
from gpt2lab.files import open_regular

Shapes = dict[str, tuple[int, ...]]


def count_parameters(model: ModelConfig) -> int:
    """Count trainable parameters.

    Equals 124,439,808 / 354,823,168 / 774,030,080 / 1,557,611,200 for the four GPT-2 sizes at V = 50257, T = 1024.
    """
    V, T, C, L = model.vocab_size, model.context_length, model.n_embd, model.n_layer
    positions = T * C if model.positions == "learned" else 0
    head = V * C + V if model.head == "untied" else 0
    norms = (1 + (model.embedding_norm == "on")) * _count_norm_parameters(model)
    return V * C + positions + L * count_block_parameters(model) + norms + head


def count_block_parameters(model: ModelConfig) -> int:
    """Count the parameters of one block: matrices, their biases, norms."""
    C = model.n_embd
    qk_norms = 2 * C // model.n_head if model.qk_norm == "rmsnorm" else 0
    return 12 * C * C + 9 * C + 2 * _count_norm_parameters(model) + qk_norms


def _count_norm_parameters(model: ModelConfig) -> int:
    """Count a LayerNorm's gain and bias, or an RMSNorm's gain."""
    return 2 * model.n_embd if model.norm == "layernorm" else model.n_embd


def count_matmul_parameters(model: ModelConfig) -> int:
    """Count the weights that a token is multiplied with: all matrices and the head, no look-ups."""
    return 12 * model.n_layer * model.n_embd**2 + model.vocab_size * model.n_embd


def count_block_matrices(model: ModelConfig) -> int:
    """Count the numbers in one block's matrices."""
    return 12 * model.n_embd**2


def flops_per_token(model: ModelConfig) -> int:
    """Count floating-point operations to train on one token: 6 N_matmul + 12 L C T.

    Forward and backward; attention as the full T x T score matrix, no causal discount; look-ups, norms and softmax
    are not counted. Source: Chowdhery et al. 2022 (PaLM, arXiv:2204.02311), appendix B.
    """
    attention = 12 * model.n_layer * model.n_embd * model.context_length
    return 6 * count_matmul_parameters(model) + attention


def training_flops_per_token(config: Config) -> int:
    """Count floating-point operations to train on one token, with adapters or without.

    Adapters: frozen matrices need no gradient, and what comes before the first adapter has no backward pass.
    """
    model, C = config.model, config.model.n_embd
    if not config.tuning.lora_r:
        return flops_per_token(model)
    has_gradient, backward = False, 2 * model.vocab_size * C
    for block, (name, (rows, columns)) in itertools.product(range(model.n_layer), _SIDES.items()):
        if has_gradient:
            backward += 2 * rows * columns * C**2
            backward += 8 * C * model.context_length * (name == "attn.c_proj")
        elif has_adapter(block, name, config.tuning):
            has_gradient = True
            backward -= 2 * config.tuning.lora_r * columns * C  # of the first adapter's input
    return flops_per_token(model) // 3 + backward + 6 * count_adapters(model, config.tuning)


def checkpoint_bytes(config: Config) -> int:
    """Return the tensor bytes of one checkpoint: weights and optimizer state, fp32.

    AdamW keeps two moments of each trained weight; Muon keeps one, for the matrices of the blocks, and NorMuon a number
    for each of their rows. --average_tail keeps a mean of each weight. The files are larger by their headers and state:
    about 200 bytes a tensor and 10 kB a rank.
    """
    model = config.model
    if config.tuning.lora_r:
        return 4 * count_parameters(model) + 12 * count_adapters(model, config.tuning)
    in_blocks = 12 * model.n_layer * model.n_embd**2 if config.optim.has_muon else 0
    rows = count_rows(model) if config.optim.optimizer == "normuon" else 0
    each = 12 + 4 * (config.optim.average_tail > 0)
    return each * count_parameters(model) - 4 * in_blocks + 4 * rows


def count_rows(model: ModelConfig) -> int:
    """Count the rows of the matrices of all blocks, of which NorMuon keeps a number each: 9 L C."""
    return 9 * model.n_layer * model.n_embd


# Rows and columns of each matrix of a block, in units of C, in the order of the forward pass.
_SIDES = {"attn.c_attn": (3, 1), "attn.c_proj": (1, 1), "mlp.c_fc": (4, 1), "mlp.c_proj": (1, 4)}


def lora_targets(config: TuningConfig) -> list[str]:
    """Return the layer names that the setting `lora_targets` lists."""
    return [word.strip() for word in config.lora_targets.split(",")]


def is_target(layer: str, target: str) -> bool:
    """Tell whether a target names a layer: by its full name, or by the end of it after a dot."""
    return target != "" and f".{layer}".endswith(f".{target}")


def check_lora_targets(model: ModelConfig, config: TuningConfig) -> None:
    """Check that every target names a layer.

    Raises: ConfigError naming the layers there are.
    """
    layers = [f"blocks.{block}.{name}" for block in range(model.n_layer) for name in _SIDES]
    for target in lora_targets(config):
        if not any(is_target(layer, target) for layer in layers):
            ends = sorted({layer.rpartition(".")[2] for layer in layers})
            raise ConfigError(
                f"lora_targets {target!r} matches no linear layer of the model; there are {', '.join(ends)} "
                f"(one of a kind: {layers[0]}, and so on)"
            )


def has_adapter(block: int, name: str, config: TuningConfig) -> bool:
    """Tell whether a matrix of a block has an adapter."""
    return any(is_target(f"blocks.{block}.{name}", target) for target in lora_targets(config))


def count_adapters(model: ModelConfig, config: TuningConfig) -> int:
    """Count the parameters of all adapters: r (rows + columns) for each matrix that is a target."""
    total = sum(
        sum(sides)
        for block in range(model.n_layer)
        for name, sides in _SIDES.items()
        if has_adapter(block, name, config)
    )
    return config.lora_r * total * model.n_embd


def read_shapes(path: Path) -> Shapes:
    """Return {name: shape} of a safetensors file.

    Raises: CheckpointError if it is not one, or ends before its last tensor.
    """
    try:
        open_regular(path, follow=True).close()
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: cut short, damaged, or no safetensors ({error}); copy it again"
        ) from error
    if not shapes:
        raise CheckpointError(f"{path}: holds no tensors")
    return shapes


def check_shapes(path: Path, shapes: Shapes, model: ModelConfig, *, rows: int) -> None:
    """Compare the sizes in a model's settings with the tensors of its file, by our names, before the model is built.

    Building a model of ten million blocks would take minutes. `rows`: of the token embedding.

    Raises: CheckpointError.
    """
    blocks = {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
    if len(blocks) != model.n_layer:
        raise CheckpointError(
            f"{path}: holds {len(blocks)} blocks, its settings say n_layer {model.n_layer}"
        )
    wanted: Shapes = {"wte.weight": (rows, model.n_embd)}
    if model.positions == "learned":
        wanted["wpe.weight"] = (model.context_length, model.n_embd)
    if model.head == "untied":
        wanted |= {"lm_head.weight": (rows, model.n_embd), "lm_head.bias": (rows,)}
    for name, shape in wanted.items():
        if (found := shapes.get(name)) != shape:
            raise CheckpointError(f"{path}: {name} is {found}, its settings mean {shape}")
