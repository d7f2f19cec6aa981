"""Look after folders of token shards.

python scripts/data.py verify data/python_stdlib
python scripts/data.py stats data/python_stdlib
python scripts/data.py show --run RUN --step 100 --text
python scripts/data.py import old_shards/
python scripts/data.py merge data/whole data/part1 data/part2
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from gpt2lab import paths
from gpt2lab.config.command_line import option, run_tyro
from gpt2lab.errors import ConfigError


@dataclass(frozen=True)
class Verify:
    """Read every byte, compare it with shards.json, and name each damaged file (exit code 1)."""

    folder: Positional[Path] = field(metadata={"help": "folder of shards"})


@dataclass(frozen=True)
class Stats:
    """Count tokens, documents and bytes of text."""

    folder: Positional[Path] = field(metadata={"help": "folder of shards"})


@dataclass(frozen=True)
class Show:
    """Print the exact tokens that an optimizer step trained on."""

    run: str = field(metadata={"help": "name of a run in checkpoints/, or its folder"})
    step: int = field(metadata={"help": "number of the update, from 1"})
    text: bool = option(False, "as text instead of ids")


@dataclass(frozen=True)
class Import:
    """Write shards.json for shards of another program: edufineweb_*.npy, or nanoGPT's train.bin and val.bin."""

    folder: Positional[Path] = field(metadata={"help": "folder of shards"})


@dataclass(frozen=True)
class Merge:
    """Join the parts that prepare_data.py --part i/n made, in the order of their numbers."""

    out: Positional[Path] = field(metadata={"help": "folder to create"})
    parts: Positional[tuple[Path, ...]] = field(metadata={"help": "all n parts, in any order"})


Command = (
    Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Stats, tyro.conf.subcommand("stats")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Import, tyro.conf.subcommand("import")]
    | Annotated[Merge, tyro.conf.subcommand("merge")]
)


def main(argv: list[str]) -> int:
    """Do what the first word says."""
    flags = run_tyro(Command, argv, about="Look after folders of token shards.")
    match flags:
        case Verify():
            return _verify(flags)
        case Stats():
            return _stats(flags)
        case Show():
            return _show(flags)
        case Import():
            return _import(flags)
        case _:
            return _merge(flags)


def _verify(flags: Verify) -> int:
    from gpt2lab.data import audit

    folder = paths.from_working_directory(flags.folder)
    problems = audit.verify(folder)
    for problem in problems:
        print(problem)
    print(f"{len(problems)} damaged" if problems else "every file is what shards.json says")
    return 1 if problems else 0


def _stats(flags: Stats) -> int:
    from gpt2lab.data import audit

    folder = paths.from_working_directory(flags.folder)
    print(audit.describe(folder, audit.measure(folder)))
    return 0


def _show(flags: Show) -> int:
    from gpt2lab.commands import ledger
    from gpt2lab.runs import history

    run_dir = history.find_run(flags.run)
    tokens = ledger.tokens_of_step(run_dir, flags.step)
    print(ledger.describe(run_dir, tokens, as_text=flags.text))
    return 0


def _import(flags: Import) -> int:
    from gpt2lab.data import adopt

    folder = paths.from_working_directory(flags.folder)
    manifest = adopt.adopt(folder)
    total = sum(file["tokens"] for file in manifest["files"])
    files, name = len(manifest["files"]), manifest["tokenizer"]["name"]
    print(f"{paths.for_people(folder)}: {files} files, {total:,} tokens, tokenizer {name}")
    return 0


def _merge(flags: Merge) -> int:
    from gpt2lab.data import merge

    if not flags.parts:
        raise ConfigError("merge: no parts given; data.py merge OUT PART1 PART2 ...")
    out = paths.from_working_directory(flags.out)
    manifest = merge.merge(out, [paths.from_working_directory(part) for part in flags.parts])
    total = sum(file["tokens"] for file in manifest["files"])
    print(f"{paths.for_people(out)}: {len(manifest['files'])} files, {total:,} tokens")
    return 0
