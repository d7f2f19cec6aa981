"""Filter and deduplicate documents with datatrove, then prepare shards of what is left.

pip install 'datatrove>=0.10' orjson 'xxhash<4'
python examples/filter_with_datatrove.py my_texts/ work/ --out data/filtered

`my_texts/` holds .jsonl files (also .gz or .zst) with a `text` column. Gopher's rules (arXiv:2112.11446) and MinHash
over 5-grams of words, as FineWeb uses it (arXiv:2406.17557), are datatrove's. Repeated, the line goes on where it
stood; other files, rules or --tasks need a new `work/`, since datatrove does not compare them. On a cluster,
SlurmPipelineExecutor takes the place of LocalPipelineExecutor.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
)
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.word_tokenizers import WordTokenizer

PREPARE = Path(__file__).resolve().parents[1] / "scripts" / "prepare_data.py"
BUCKETS = 14  # with 8 hashes in each, texts with three quarters of their 5-grams in common are mostly found


class Words(WordTokenizer):  # type: ignore[misc]  # datatrove carries no types
    """Split text at what is neither letter nor digit; datatrove's default for English needs spaCy."""

    def word_tokenize(self, text: str) -> list[str]:
        """Return words, and each other mark alone."""
        return re.findall(r"\w+|[^\w\s]", text)

    def sent_tokenize(self, text: str) -> list[str]:
        """Return sentences."""
        return [sentence for sentence in re.split(r"(?<=[.!?])\s+", text) if sentence]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Return where each sentence begins and ends, in characters."""
        spans, start = [], 0
        for sentence in self.sent_tokenize(text):
            start = text.index(sentence, start)
            spans.append((start, start + len(sentence)))
            start += len(sentence)
        return spans


def filter_and_deduplicate(source: Path, work: Path, *, tasks: int, workers: int) -> Path:
    """Write the documents that pass the rules, one of each group of near-duplicates; return their folder."""
    words, minhash = Words(), MinhashConfig(num_buckets=BUCKETS)
    filtered, signatures, buckets, duplicates, kept = (
        str(work / name) for name in ("filtered", "signatures", "buckets", "duplicates", "kept")
    )
    stages: dict[str, tuple[list[PipelineStep], int]] = {
        "filter": (
            [
                JsonlReader(str(source)),
                GopherRepetitionFilter(language=words),
                GopherQualityFilter(language=words),
                JsonlWriter(filtered, compression=None),
            ],
            tasks,
        ),
        "sign": (
            [JsonlReader(filtered), MinhashDedupSignature(signatures, minhash, language=words)],
            tasks,
        ),
        "match": ([MinhashDedupBuckets(signatures, buckets, config=minhash)], BUCKETS),
        "cluster": ([MinhashDedupCluster(buckets, duplicates, config=minhash)], 1),
        "drop": (
            [
                JsonlReader(filtered),  # the same files for the same tasks as when they were signed
                MinhashDedupFilter(duplicates),
                JsonlWriter(kept, compression=None),
            ],
            tasks,
        ),
    }
    for name, (steps, number) in stages.items():
        if name == "sign" and not any(Path(filtered).glob("*.jsonl")):
            sys.exit(f"error: {source}: no document passes the rules; choose others in {__file__}")
        executor = LocalPipelineExecutor(
            steps,
            tasks=number,
            workers=min(workers, number),
            logging_dir=str(work / "logs" / name),  # tasks that are complete are not repeated
        )
        executor.run()
    return Path(kept)


def main() -> int:
    """Filter, deduplicate, prepare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, help="folder of .jsonl files")
    parser.add_argument("work", type=Path, help="folder for what lies between the stages")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--tasks", type=int, default=os.cpu_count(), help="shares of the files")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at once")
    parser.add_argument("--val_tokens", type=int, help="tokens held out, as prepare_data.py has it")
    flags = parser.parse_args()
    if not any(flags.source.rglob("*.jsonl*")):
        parser.error(f"{flags.source}: no .jsonl files")
    kept = filter_and_deduplicate(
        flags.source, flags.work, tasks=flags.tasks, workers=flags.workers
    )
    prepare = [sys.executable, str(PREPARE), str(kept), "--out", str(flags.out)]
    if flags.val_tokens is not None:
        prepare += ["--val_tokens", str(flags.val_tokens)]
    return subprocess.run(prepare).returncode


if __name__ == "__main__":
    sys.exit(main())
