"""Tokenize text into the shards that the trainer reads.

gpt2lab prepare shakespeare --tokenizer bytes
gpt2lab prepare python-stdlib
gpt2lab prepare fineweb-edu
gpt2lab prepare climbmix --num_files 8
gpt2lab prepare my_texts/ --out data/my_texts
gpt2lab prepare my_texts/ --tokenizer data/std_4k --out data/my_texts_4k
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2lab import fmt, paths
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument, check_least, option
from gpt2lab.errors import ConfigError, GPT2LabError
from gpt2lab.runs.console import say
from gpt2lab.tokenizers.named import TOKENIZER, open_tokenizer

if TYPE_CHECKING:
    from gpt2lab.config.schema import ModelName
    from gpt2lab.planner.estimate import Estimate
    from gpt2lab.training.plan import Plan


@dataclass(frozen=True)
class PrepareData:
    """Tokenize text into the shards that the trainer reads.

    After an interruption the same command line resumes where it stopped.
    """

    source: str = argument(
        "shakespeare | python-stdlib | fineweb-edu | climbmix | hf:NAME | a file or folder"
    )
    out: Path | None = option(None, "folder to create; default data/NAME")
    shard_tokens: int = option(100_000_000, "tokens per shard file", least=2)
    val_tokens: int | None = option(
        None,
        "tokens of the validation split, about; default 5 % of the text, at most 100M",
        least=2,
    )
    max_tokens: int | None = option(None, "stop after this many tokens", least=16)
    tokenizer: str = option("gpt2", TOKENIZER)
    end_token: str | None = option(
        None, "end-of-text token of --tokenizer, if its files do not name one"
    )
    text_column: str = option("text", "text column of .jsonl, .parquet and Hugging Face data")
    subset: str | None = option(
        None,
        "subset of a Hugging Face dataset; fineweb-edu: sample-10BT (default), sample-100BT ... full",
    )
    revision: str | None = option(None, "commit of a Hugging Face dataset; default the newest")
    num_files: int | None = option(None, "train on the first N files only", least=1)
    val_file: str | None = option(
        None,
        "file whose documents are the validation split, by its name; climbmix: as nanochat, its last file",
    )
    shuffle_documents: bool = option(
        False, "shuffle the documents of all files, in an order that depends only on the files"
    )
    num_workers: int | None = option(None, "tokenizing processes; default one per core", least=1)
    group_bytes: int = option(
        1_000_000_000,
        "stored bytes per group of source files, the unit of work; another value gives different shards",
        least=1,
    )
    part: str = option(
        "1/1", "i/n: prepare the i-th of n parts; join them with `gpt2lab data merge`"
    )
    ray: str | None = option(
        None, "address of a Ray cluster that prepares the groups; auto = the one of this machine"
    )
    skip_bad: bool = option(False, "skip and count records that cannot be read")


_COMMON = (  # flags of the short help
    *("source", "out", "max_tokens", "val_tokens", "tokenizer", "text_column", "subset"),
    *("num_workers", "skip_bad"),
)


def main(argv: list[str]) -> int:
    """Prepare one source and print what was written; SIGTERM, by which a scheduler ends a job, acts as Ctrl+C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        prepare(parse_flags(PrepareData, argv, common=_COMMON))
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)


def prepare(flags: PrepareData) -> Path:
    """Prepare one source, print what was written, and return its folder.

    Raises: GPT2LabError.
    """
    check_least(flags)
    from gpt2lab.data.manifest import read_manifest
    from gpt2lab.data.prepare import pipeline
    from gpt2lab.data.prepare.sources import open_source

    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", flags.part)
    part = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= part[0] <= part[1]:
        raise ConfigError(f"part {flags.part!r} must be i/n with i from 1 to n, such as 2/4")
    tokenizer = open_tokenizer(flags.tokenizer, flags.end_token)
    source = open_source(
        flags.source,
        text_column=flags.text_column,
        subset=flags.subset,
        revision=flags.revision,
        num_files=flags.num_files,
        val_file=flags.val_file,
    )
    suffix = f"_part{part[0]}of{part[1]}" if part[1] > 1 else ""
    default = paths.from_repository(Path("data") / f"{source.name}{suffix}")
    folder = paths.from_working_directory(flags.out) if flags.out else default
    result = pipeline.prepare(
        source,
        folder,
        pipeline.Sizes(flags.shard_tokens, flags.val_tokens, flags.max_tokens, flags.group_bytes),
        num_workers=flags.num_workers,
        part=part,
        skip_bad=flags.skip_bad,
        shuffle=flags.shuffle_documents,
        tokenizer=tokenizer,
        ray_address=flags.ray,
    )
    manifest = result.manifest if result else read_manifest(folder)
    for warning in result.warnings if result else ():
        say(f"warning: {warning}")
    if "content" not in manifest:
        say(
            "warning: prepared by an earlier version: only names and sizes of the sources were compared"
        )
    already = f"{paths.display_path(folder)}: already prepared"
    print(pipeline.result_table(result) if result else already)
    if part[1] == 1:
        print_advice(folder, manifest)
    else:
        print(f"join all {part[1]} parts with: gpt2lab data merge OUT PART1 PART2 ...")
    return folder


def print_advice(folder: Path, manifest: dict[str, Any]) -> None:
    """Print lines on a first run on the data, or why there is no forecast: the data are ready all the same."""
    try:
        print("\n".join(advise_first_run(folder, manifest)))
    except GPT2LabError as error:  # such as of an unknown tokenizer, or of the user's hardware.json
        print(f"forecast       n/a: {error}")


def advise_first_run(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """Return lines on a first run on the data: its time, epochs and disk, and at last its command."""
    from gpt2lab.commands.command_line import parse
    from gpt2lab.planner import auto, machine
    from gpt2lab.training.resolve import resolve

    def words(model: str, **flags: Any) -> list[str]:
        typed = {"model": model, "data_dir": paths.display_path(folder), **flags}
        return [word for name, value in typed.items() for word in (f"--{name}", str(value))]

    def planned(words: list[str]) -> tuple[Plan, Estimate | None]:
        start = resolve(parse(words).request, world_size=1, set_aside=False)
        return start.plan, auto.estimate_here(start)

    def affordable(model: ModelName) -> float:
        plan, found = planned(words(model, max_steps=1000))
        return plan.tokens * auto.FIRST_RUN_SECONDS / found.seconds.value if found else inf

    files = manifest["files"]
    train = sum(file["tokens"] for file in files if file["split"] == "train")
    shortest, of = min((file["tokens"], file["split"]) for file in files)
    flags = auto.choose_first_run(train, shortest, affordable=affordable)
    if not flags:
        few = f"too little text: {train:,} tokens to train on, {shortest:,} in a {of} shard"
        return [f"{few}; prepare more text, longer documents, or more --val_tokens"]
    if planned(words(**flags))[0].disk_bytes > auto.FIRST_RUN_BYTES:
        flags |= {"keep_checkpoints": 1, "epoch_checkpoints": "off"}
    plan, found = planned(command := words(**flags))
    if found and found.memory.fits is False and (smaller := auto.fitting_flag(found.memory)):
        command += smaller.split()
    time, limit = "n/a: this GPU is not known", ""
    if found:
        busy = machine.describe_load() if found.machine.is_cpu else None
        time = "; ".join(filter(None, (found.describe_time(), busy)))
        whole = fmt.duration(found.seconds.value / plan.epochs)
        limit = f", half an hour of this machine; one epoch takes about {whole}"
    is_large = plan.disk_bytes > auto.FIRST_RUN_BYTES
    return [
        f"forecast       {time}",
        f"epochs         {plan.epochs:.2g} ({plan.tokens:,} tokens{limit if 'max_tokens' in flags else ''})",
        f"checkpoints    {plan.describe_disk()}{', the least that a run keeps' if is_large else ''}",
        f"train with: {fmt.command_line([*paths.command_words('train'), *command])}",
    ]
