"""Write a run's weights for other programs: a folder for transformers, or a GGUF file for llama.cpp.

gpt2lab export latest --out exports/latest
gpt2lab export latest/step_00000200 --out small --dtype bfloat16
gpt2lab export latest --format gguf --dtype q8_0 --out latest.gguf
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpt2lab import fmt, paths
from gpt2lab.commands.parser import AmongRuns, WithJson, parse_flags
from gpt2lab.config.flags import TARGET, argument, option, required
from gpt2lab.errors import ConfigError
from gpt2lab.runs.console import doing, say
from gpt2lab.runs.target import find_target

# The types of the weights that each format has; the first is the default.
_DTYPES = {"transformers": ("float32", "bfloat16"), "gguf": ("float32", "float16", "q8_0")}


@dataclass(frozen=True)
class Export(WithJson, AmongRuns):
    """Write a run's weights for transformers or llama.cpp, read back and compared before they appear."""

    target: str = argument(TARGET)
    out: Path = required("folder to write, or file.gguf; must not exist")
    format: Literal["transformers", "gguf"] = option(
        "transformers", "gguf: one file for llama.cpp (GPT-2's shape only)"
    )
    dtype: Literal["float32", "bfloat16", "float16", "q8_0"] = option(
        "float32",
        "of the weights: float32 or bfloat16 for transformers; float32, float16 or q8_0 for gguf",
    )
    max_shard_size: str | None = option(
        None,
        "split larger weights for transformers into files of this size, such as 200MB; default 5GB",
    )
    push_to_hub: str | None = option(None, "also upload to this name on the Hugging Face Hub")


def main(argv: list[str]) -> int:
    """Export, check and print."""
    flags = parse_flags(Export, argv)
    shard_bytes = _check(flags)
    target = find_target(flags.target, paths.runs_folder(flags.checkpoint_dir))
    out, dtype = paths.from_working_directory(flags.out), flags.dtype
    with doing(f"writing and checking {paths.display_path(out)}"):
        if flags.format == "gguf":  # torch comes from here on, so a wrong name does not wait for it
            from gpt2lab.interop.gguf_file import export_gguf

            found, warnings = export_gguf(target, out=out, dtype=dtype)
        else:
            from gpt2lab.interop.export import export

            found, warnings = export(
                target, out=out, dtype=dtype, push_to_hub=flags.push_to_hub, shard_bytes=shard_bytes
            )
    for warning in warnings:
        say(f"warning: {warning}")
    whose = {"transformers": "transformers' logits", "gguf": "logits of the file's weights"}
    size = f"{found['parameters']:,} parameters, {found['dtype']}"
    error = f"{whose[flags.format]} differ by at most {found['max_abs_diff']:.1e} of {found['max_abs_logit']:.1f}"
    print(json.dumps(found) if flags.json else f"{paths.display_path(out)}: {size}; {error}")
    return 0


def _check(flags: Export) -> int:
    """Reject flags that do not go together; return the largest size of a file."""
    if flags.dtype not in _DTYPES[flags.format]:
        raise ConfigError(
            f"--format {flags.format} has no --dtype {flags.dtype}; it has {', '.join(_DTYPES[flags.format])}"
        )
    if flags.format == "transformers" and flags.out.suffix == ".gguf":
        raise ConfigError(f"--out {flags.out}: a file for llama.cpp is made with --format gguf")
    for name in ("max_shard_size", "push_to_hub"):
        if flags.format == "gguf" and getattr(flags, name) is not None:
            raise ConfigError(f"--{name} is for --format transformers; leave it out")
    try:
        shard_bytes = fmt.parse_bytes(
            "5GB" if flags.max_shard_size is None else flags.max_shard_size
        )
    except ValueError as error:
        raise ConfigError(f"--max_shard_size {error}") from error
    if shard_bytes < 1:
        raise ConfigError(f"--max_shard_size {flags.max_shard_size} must be above 0")
    return shard_bytes
