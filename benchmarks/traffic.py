"""Count what collectives carry, by watching the calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from gpt2lab.planner.communication import Collective

# torch's names, and which argument holds the whole.
_KINDS: dict[str, tuple[Collective, int]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
}


class Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts calls and bytes of float tensors; decisions travel as integers and do not count.

    Bytes are those of the whole tensor that a collective sums, gathers or scatters, as one process sees it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a collective, and run whatever it is."""
        kind, place = _KINDS.get(func._schema.name, (None, 0))
        if kind is not None:
            held = args[place]
            for tensor in held if isinstance(held, (list, tuple)) else [held]:
                if tensor.is_floating_point():
                    self.calls[kind] += 1
                    self.bytes[kind] += tensor.nbytes
        elif func.namespace == "_c10d_functional" and "wait" not in func._schema.name:
            raise AssertionError(f"{func}: a collective that is not counted")
        return func(*args, **(kwargs or {}))
