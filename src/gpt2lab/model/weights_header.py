"""What the header of a weights file says of the model, compared with its settings before anything is built. No torch.

Settings are a few numbers that anybody can write, and a model of ten million blocks takes minutes before the first
tensor is looked at. The tensors themselves fill the file: safetensors rejects a header that claims more.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gpt2lab.config.schema import ModelConfig
from gpt2lab.errors import CheckpointError
from gpt2lab.files import is_count, open_regular, parse_json

_MOST_BYTES = 100_000_000  # of a header, as in safetensors itself
Shapes = dict[str, tuple[int, ...]]


def read_shapes(path: Path) -> Shapes:
    """Return {name: shape} of a safetensors file.

    Raises: CheckpointError if it is none, or ends before its last tensor.
    """
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length) if length <= _MOST_BYTES else b"")
            size = file.seek(0, 2)
        shapes = {name: _shape(one) for name, one in header.items() if name != "__metadata__"}
        end = 8 + length + max(one["data_offsets"][1] for one in header.values() if "shape" in one)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged, or no safetensors ({error})") from error
    if end != size:
        raise CheckpointError(f"{path}: {size} bytes, but its header promises {end}; copy it again")
    return shapes


def _shape(tensor: Any) -> tuple[int, ...]:
    if not all(map(is_count, tensor["shape"])):
        raise ValueError(f"shape {tensor['shape']!r:.60}")
    return tuple(tensor["shape"])


def check_shapes(path: Path, shapes: Shapes, model: ModelConfig, *, rows: int) -> None:
    """Compare the sizes that the settings of a model name with the tensors of its file, by our names.

    `rows`: of the token embedding.

    Raises: CheckpointError.
    """
    blocks = {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
    if len(blocks) != model.n_layer:
        raise CheckpointError(
            f"{path}: holds {len(blocks)} blocks, its settings say n_layer {model.n_layer}"
        )
    wanted = {"wte.weight": (rows, model.n_embd)}
    if model.positions == "learned":
        wanted["wpe.weight"] = (model.context_length, model.n_embd)
    for name, shape in wanted.items():
        if (found := shapes.get(name)) != shape:
            raise CheckpointError(f"{path}: {name} is {found}, its settings mean {shape}")


def count_values(shapes: Shapes) -> int:
    """Count the values of all tensors."""
    return sum(math.prod(shape) for shape in shapes.values())
