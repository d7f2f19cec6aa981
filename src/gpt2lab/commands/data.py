"""Verify, inspect, import and merge folders of token shards.

gpt2lab data verify data/python_stdlib
gpt2lab data stats data/python_stdlib
gpt2lab data show RUN --step 100 --text
gpt2lab data import old_shards/
gpt2lab data merge data/full data/part1 data/part2
gpt2lab data tokenizer train python-stdlib --vocab_size 512 --out tok512
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2lab import paths
from gpt2lab.commands.parser import AmongRuns, parse_flags
from gpt2lab.commands.prepare_data import print_advice
from gpt2lab.config.flags import RUN, argument, option, required
from gpt2lab.data.manifest import SPLITS, end_of_text_of
from gpt2lab.data.shards import open_data
from gpt2lab.errors import ConfigError
from gpt2lab.interop.import_shards import ImportOptions, import_folder
from gpt2lab.runs.console import say

if TYPE_CHECKING:
    from gpt2lab.lab.step_tokens import StepTokens


@dataclass(frozen=True)
class Verify:
    """Read every byte, compare with shards.json, and name each damaged file (exit code 1).

    Also measures how much of the validation split recurs in training.
    """

    folder: Path = argument("folder of shards")
    sources: str | None = option(
        None, "the source that was prepared: compare its files' bytes with the recorded hashes too"
    )

    def execute(self) -> int:
        """Name the damaged files and return the exit code."""
        from gpt2lab.data.prepare.sources import open_source
        from gpt2lab.data.verify import NGRAM, compare_sources, measure_overlap, verify

        folder = paths.from_working_directory(self.folder)
        source = self.sources and open_source(self.sources, text_column="text")
        problems = verify(folder)
        if source:
            problems += compare_sources(folder, source)
        for problem in problems:
            print(problem)
        if problems:
            print(f"{len(problems)} damaged")
            return 1
        print(f"every file {'and every source ' if source else ''}matches shards.json")
        overlap = measure_overlap(open_data(folder, vocab_size=None))
        if overlap is None:
            print(f"overlap with training n/a: no document of validation has {NGRAM} tokens")
        else:
            share = "under 0.1%" if 0 < overlap < 0.0005 else f"{overlap:.1%}"
            print(f"{share} of the {NGRAM}-grams of validation occur in training")
        return 0


@dataclass(frozen=True)
class Stats:
    """Count tokens, documents and bytes of text."""

    folder: Path = argument("folder of shards")

    def execute(self) -> int:
        """Print the counts."""
        from gpt2lab.data.verify import measure, stats_table

        folder = paths.from_working_directory(self.folder)
        print(stats_table(folder, measure(folder)))
        return 0


@dataclass(frozen=True)
class Show(AmongRuns):
    """Print the exact tokens that an optimizer step trained on."""

    run: str = argument(RUN)
    step: int = required("number of the update, from 1")
    text: bool = option(False, "as text instead of ids")
    data_dir: tuple[str, ...] = option((), "where the run's data is now, if it was moved")

    def execute(self) -> int:
        """Print the tokens."""
        from gpt2lab.runs.target import find_run

        run_dir = find_run(self.run, self.checkpoint_dir)
        tokens = tokens_of_step(run_dir, self.step, self.data_dir)
        print(tokens_as_text(run_dir, tokens, as_text=self.text))
        return 0


@dataclass(frozen=True)
class Import(ImportOptions):
    """Write shards.json for token files of another program, read in place.

    Read are .npy, .bin of llm.c and modded-nanogpt, datatrove's .ds, Megatron's .bin and .idx, and nanoGPT's .bin.
    """

    folder: Path = argument("folder of token files")
    out: Path | None = option(None, "new folder for shards.json, if FOLDER is not to be written to")

    def execute(self) -> int:
        """Write the manifest and print what it holds."""
        folder = paths.from_working_directory(self.folder)
        out = paths.from_working_directory(self.out) if self.out else None
        manifest = import_folder(folder, self, out)
        print(f"{_size(out or folder, manifest)}, {_described(manifest)}")
        if not manifest["documents"] and manifest["tokenizer"]["name"] == "gpt2":  # the default
            say(
                "warning: no end of text of gpt2: another --tokenizer wrote these ids, or one document"
            )
        of_train, of_val = (
            {entry["sha256"] for entry in manifest["files"] if entry["split"] == split}
            for split in SPLITS
        )
        if of_train & of_val:
            say("warning: a val shard has the bytes of a train shard: its loss is on trained text")
        print_advice(out or folder, manifest)
        return 0


@dataclass(frozen=True)
class Merge:
    """Join the parts that `gpt2lab prepare --part i/n` wrote, in the order of their numbers."""

    out: Path = argument("folder to create")
    parts: tuple[Path, ...] = argument("all n parts, in any order")

    def execute(self) -> int:
        """Join and print what came out."""
        from gpt2lab.data.prepare.assemble import merge

        if not self.parts:
            raise ConfigError("no parts given: gpt2lab data merge OUT PART1 PART2 ...")
        out = paths.from_working_directory(self.out)
        manifest = merge(out, [paths.from_working_directory(part) for part in self.parts])
        print(_size(out, manifest))
        return 0


VERBS = {"verify": Verify, "stats": Stats, "show": Show, "import": Import, "merge": Merge}


def main(argv: list[str]) -> int:
    """Run the verb that the first word names."""
    return int(parse_flags(VERBS, argv).execute())


def tokens_of_step(run_dir: Path, step: int, data_dir: tuple[str, ...] = ()) -> "StepTokens":
    """Return what update number `step` of a run trained on; see `lab.step_tokens`."""
    from gpt2lab.commands.train import recipe_of
    from gpt2lab.lab import step_tokens

    run = step_tokens.RecordedRun(run_dir, recipe_of(run_dir), data_dir)
    return step_tokens.tokens_of_step(run, step)


def tokens_as_text(run_dir: Path, tokens: "StepTokens", *, as_text: bool) -> str:
    """Print the windows in sample order, as ids or as text, each with its place."""
    tokenizer = tokens.data.tokenizer
    if as_text and tokenizer is None:
        raise ConfigError(
            f"--text: the tokenizer of {run_dir.name}'s data is not known; leave it out"
        )
    count, width = tokens.windows.shape
    lines = [
        f"step {tokens.step} of {paths.display_path(run_dir)}: epoch {tokens.epoch}, {count} windows "
        f"of {width - 1} + 1 tokens, batch_hash {tokens.hash} as logged"
    ]
    for row, place in enumerate(tokens.places):
        lines.append(f"--- sample {tokens.first_sample + row}: {place}")
        ids = tokens.windows[row].tolist()
        lines.append(tokenizer.decode(ids) if as_text and tokenizer else " ".join(map(str, ids)))
    return "\n".join(lines)


def _size(folder: Path, manifest: dict[str, Any]) -> str:
    files = manifest["files"]
    total = sum(file["tokens"] for file in files)
    return f"{paths.display_path(folder)}: {len(files)} files, {total:,} tokens"


def _described(manifest: dict[str, Any]) -> str:
    """Say how the files of another program were taken: what was not typed can be checked here."""
    files = manifest["files"]
    count = {split: sum(file["split"] == split for file in files) for split in ("train", "val")}
    end = end_of_text_of(manifest)
    documents = "documents of the index" if "index" in files[0] else "no end of text known"
    if end.id is not None:
        documents = f"{end.id} {end.place} each document"
    return (
        f"{count['train']} train, {count['val']} val, format {manifest.get('layout', 'npy')}, "
        f"tokenizer {manifest['tokenizer']['name']}, {documents}, {manifest['documents']:,} documents"
    )
