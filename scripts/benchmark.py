"""Measure this machine, side by side with other ways of doing the same. One verb per measurement.

python scripts/benchmark.py hellaswag --hellaswag_path hellaswag_val.jsonl
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import _bootstrap  # noqa: F401
from gpt2lab.config import ModelName
from gpt2lab.door import run
from gpt2lab.errors import ConfigError
from gpt2lab.flags import option, run_tyro


@dataclass(frozen=True)
class HellaSwag:
    """Score HellaSwag our way and as the tutorial lineage's four-rows loop does, in turns."""

    hellaswag_path: Path | None = option(None, "HellaSwag items; default: downloaded once")
    model: ModelName = option("gpt2", "shape of the model, with random weights")
    items: int = option(100, "items scored: a fixed random subset")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = cuda if there is one")
    dtype: Literal["auto", "fp32", "bf16"] = option("fp32", "matmul precision of both")
    json: Path | None = option(None, "also write the numbers to this file")


VERBS: dict[str, Any] = {"hellaswag": HellaSwag}


def main(argv: list[str]) -> int:
    """Run one measurement and print it."""
    known = "".join(f"\n  {name:12}{verb.__doc__}" for name, verb in VERBS.items())
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: benchmark.py VERB [--help]\n{known}")
        return 0
    if argv[0] not in VERBS:
        raise ConfigError(f"no benchmark {argv[0]!r}; there are: {', '.join(VERBS)}")
    flags = run_tyro(VERBS[argv[0]], argv[1:])
    result, text = measure_hellaswag(flags)
    print(text)
    if flags.json:
        flags.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure_hellaswag(flags: HellaSwag) -> tuple[dict[str, Any], str]:
    """Return the numbers and their table."""
    from gpt2lab import paths
    from gpt2lab.bench import hellaswag
    from gpt2lab.data.hellaswag_source import fetch_hellaswag

    typed = flags.hellaswag_path
    result = hellaswag.compare_with_tutorial(
        paths.from_working_directory(typed) if typed else fetch_hellaswag(),
        model_name=flags.model,
        items=flags.items,
        device=flags.device,
        dtype=flags.dtype,
    )
    return result, hellaswag.describe(result)


if __name__ == "__main__":
    sys.exit(run(main))
