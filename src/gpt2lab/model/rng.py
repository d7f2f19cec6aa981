"""Random generators: seeds derived from places in the run, and the states that a checkpoint keeps."""

from __future__ import annotations

import base64
import hashlib
import random
from typing import Any, cast

import numpy as np
import torch


def fold_seed(*parts: int) -> int:
    """Mix integers into one 63-bit seed; the same on every machine.

    >>> fold_seed(1337, 1, 0) == fold_seed(1337, 1, 0) != fold_seed(1337, 0, 1)
    True
    """
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed the global generators; learning never depends on their state between micro-batches."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture(device: torch.device) -> dict[str, Any]:
    """Return the states of python's, numpy's and torch's generators as JSON values."""
    name, keys, position, has_gauss, gauss = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    states = {
        "python": random.getstate(),
        "numpy": [name, _encode(keys.astype("<u4").tobytes()), position, has_gauss, gauss],
        "torch": _encode(torch.get_rng_state().numpy().tobytes()),
    }
    if device.type == "cuda":
        states["cuda"] = _encode(torch.cuda.get_rng_state(device).numpy().tobytes())
    return states


def restore(states: dict[str, Any], device: torch.device) -> None:
    """Restore captured states of the generators.

    Raises: LookupError, TypeError, ValueError, ArithmeticError or RuntimeError if they are invalid.
    """
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = states["numpy"]
    if not 0 <= position <= 624:  # numpy would read beyond its state
        raise ValueError(f"numpy's position {position}")
    np.random.set_state(
        (name, np.frombuffer(base64.b64decode(keys), "<u4"), position, has_gauss, gauss)
    )
    torch.set_rng_state(_decode(states["torch"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(_decode(states["cuda"]), device)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
