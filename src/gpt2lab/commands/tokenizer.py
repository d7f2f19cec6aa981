"""Train a tokenizer on text, and compare tokenizers on a text.

gpt2lab data tokenizer train python-stdlib --vocab_size 4096 --out data/std_4k
gpt2lab data tokenizer show data/std_4k gpt2 --source python-stdlib
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpt2lab import fmt, paths
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument, option, required
from gpt2lab.errors import ConfigError, system_errors_as
from gpt2lab.files import replace_durably, staged_folder, write_durably
from gpt2lab.tokenizers.gpt2 import CUTS
from gpt2lab.tokenizers.named import TOKENIZER, open_tokenizer
from gpt2lab.tokenizers.plain import BYTES

_MOST_IDS = 10_000_000  # the library allocates memory for all of them first, and aborts without it
_SHOWN_BYTES = 10_000_000  # of a source, to count tokens


@dataclass(frozen=True)
class Train:
    """Learn a byte-level BPE, or the characters of a text."""

    source: str = argument(
        "shakespeare | python-stdlib | fineweb-edu | climbmix | hf:NAME | a file or folder"
    )
    out: Path = required("folder to create, or a .json file for tokenizer.json alone")
    vocab_size: int | None = option(
        None, "ids in all, <|endoftext|> and the 256 bytes among them; default 32768"
    )
    kind: Literal["bpe", "characters"] = option(
        "bpe", "characters: one id for each that occurs, as many as there are"
    )
    max_bytes: int = option(
        1_000_000_000,
        "bytes of text to train on; of a larger text, shares of all files are taken",
        least=1,
    )
    val_tokens: int | None = option(
        None,
        "as you will give it to `gpt2lab prepare`: documents that it holds out are not trained on",
        least=2,
    )
    max_tokens: int | None = option(None, "as you will give it to `gpt2lab prepare`", least=16)
    text_column: str = option("text", "text column of .jsonl, .parquet and Hugging Face data")
    subset: str | None = option(None, "subset of a Hugging Face dataset")
    revision: str | None = option(None, "commit of a Hugging Face dataset; default the newest")
    skip_bad: bool = option(False, "skip records that cannot be read")

    def execute(self) -> int:
        """Learn, write, and print what it is."""
        from gpt2lab.data.prepare.pipeline import learning_texts
        from gpt2lab.data.prepare.sources import open_source
        from gpt2lab.tokenizers.bpe import characters_of, train_bpe

        out = paths.from_working_directory(self.out)
        if out.exists():
            raise ConfigError(f"{out}: exists already; choose another --out")
        if (self.vocab_size or 0) > _MOST_IDS:
            raise ConfigError(f"vocab_size {self.vocab_size} must be at most {_MOST_IDS:,}")
        is_bpe = self.kind == "bpe"
        if not is_bpe and out.suffix == ".json":
            raise ConfigError(f"{out}: characters are written as a folder; choose another --out")
        for name in () if is_bpe else ("vocab_size", "val_tokens", "max_tokens"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"--{name}: --kind characters takes every character of the text; leave it out"
                )
        source = open_source(
            self.source, text_column=self.text_column, subset=self.subset, revision=self.revision
        )
        texts = learning_texts(
            source,
            max_bytes=self.max_bytes,
            val_tokens=self.val_tokens,
            max_tokens=self.max_tokens,
            skip_bad=self.skip_bad,
            with_held_out=not is_bpe,  # a character that was never seen could not be encoded
            cuts=CUTS if is_bpe else BYTES.cuts,
        )
        found = train_bpe(texts, self.vocab_size or 32_768) if is_bpe else characters_of(texts)
        with system_errors_as(ConfigError, out, fix="choose another --out"):
            out.parent.mkdir(parents=True, exist_ok=True)
            if out.suffix == ".json":
                replace_durably(out, found.tokenizer_json())
            else:
                with staged_folder(out) as staging:
                    for name, content in found.files.items():
                        write_durably(staging / name, content)
        print(f"{paths.display_path(out)}: {found.describe()}, end of text {found.end_of_text}")
        return 0


@dataclass(frozen=True)
class Show:
    """Print size, end of text and hash of tokenizers, and the bytes of a text that a token holds."""

    tokenizers: tuple[str, ...] = argument(TOKENIZER)
    source: str | None = option(
        None, "text to count on, as `gpt2lab prepare` takes it; up to 10 MB"
    )
    end_token: str | None = option(None, "end-of-text token, if the files do not name one")
    text_column: str = option("text", "text column of .jsonl, .parquet and Hugging Face data")

    def execute(self) -> int:
        """Print a row for each."""
        from gpt2lab.data.prepare.pipeline import learning_texts
        from gpt2lab.data.prepare.sources import open_source

        if not self.tokenizers:
            raise ConfigError(f"show: no tokenizer given: {TOKENIZER}")
        texts: list[str] = []
        if self.source is not None:
            source = open_source(self.source, text_column=self.text_column)
            texts += learning_texts(
                source, max_bytes=_SHOWN_BYTES, with_held_out=True, skip_bad=True, cuts=CUTS
            )
        rows = []
        for name in self.tokenizers:
            is_file = paths.expand_user(name).exists()
            found = open_tokenizer(name, self.end_token if is_file else None)
            density = "n/a"
            if texts:
                tokens = sum(len(ids) for ids in found.encode_documents(texts))
                num_bytes = sum(len(text.encode()) for text in texts)
                density = f"{num_bytes / tokens:.3f}" if tokens else "n/a"
            end = f"{found.end_token} ({found.end_of_text})"
            rows.append((name, found.name, f"{found.size:,}", end, found.hash[:12], density))
        head = ("", "name", "ids", "end of text", "sha256", "bytes per token")
        print(fmt.table(head, rows))
        return 0


VERBS = {"train": Train, "show": Show}


def main(argv: list[str]) -> int:
    """Run the verb that the first word names."""
    return int(parse_flags(VERBS, argv, name="gpt2lab data tokenizer").execute())
