"""Tokenise text into the shards that the trainer reads.

python scripts/prepare_data.py python-stdlib
python scripts/prepare_data.py fineweb-edu
python scripts/prepare_data.py my_texts/ --out data/my_texts
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from tyro.conf import Positional

import _bootstrap  # noqa: F401
from gpt2lab.door import run
from gpt2lab.flags import option, run_tyro


@dataclass(frozen=True)
class PrepareData:
    """Tokenise text into the shards that the trainer reads."""

    source: Positional[str] = field(
        metadata={"help": "python-stdlib | fineweb-edu | hf:NAME | a file or folder"}
    )
    out: Path | None = option(None, "folder to create; default data/NAME in the repository")
    shard_tokens: int = option(100_000_000, "tokens per shard file")
    val_tokens: int | None = option(
        None, "tokens of the validation split; default 5 % of the text, at most 100M"
    )
    max_tokens: int | None = option(None, "stop after this many tokens")
    text_column: str = option("text", "column of .jsonl, .parquet and Hugging Face data")


def main(argv: list[str]) -> int:
    """Prepare one source and print what was written."""
    flags = run_tyro(PrepareData, argv)
    from gpt2lab import paths
    from gpt2lab.data.prepare import check_sizes, describe, prepare
    from gpt2lab.data.sources import open_source

    check_sizes(
        shard_tokens=flags.shard_tokens, val_tokens=flags.val_tokens, max_tokens=flags.max_tokens
    )
    source = open_source(flags.source, text_column=flags.text_column)
    default = paths.from_repository(Path("data") / source.name)
    folder = paths.from_working_directory(flags.out) if flags.out else default
    result = prepare(
        source,
        folder,
        shard_tokens=flags.shard_tokens,
        val_tokens=flags.val_tokens,
        max_tokens=flags.max_tokens,
    )
    print(describe(result) if result else f"{paths.for_people(folder)}: already prepared")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
