"""examples/ as their first lines say they are used."""

import json
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

import launch
from corpora import write_jsonl
from ecosystem import works_with
from gpt2lab.data.verify import verify
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, GPT2
from launch import REPOSITORY

pytestmark = pytest.mark.slow  # datatrove starts two processes for each of five stages
STOP_WORDS = ["the", "be", "to", "of", "and", "that", "have", "with"]
SYLLABLES = ["ka", "lo", "mi", "ten", "sur", "vel", "dra", "po"]


def story(seed: int) -> str:
    """Return made-up words that pass Gopher's rules: some stop words, and next to no pair of words twice."""
    rng = np.random.RandomState(seed)
    words = ["".join(rng.choice(SYLLABLES, rng.randint(1, 4))) for _ in range(200)]
    for place in rng.choice(200, 30, replace=False):
        words[place] = str(rng.choice(STOP_WORDS))
    return " ".join(words) + "."


def run_example(*words: str, folder: Path) -> launch.Done:
    """Run the example as two tasks in two processes."""
    example = REPOSITORY / "examples" / "filter_with_datatrove.py"
    return launch.python(example, *words, "--tasks=2", "--workers=2", folder=folder)


def test_datatrove_filters_and_deduplicates_what_is_prepared(tmp_path):
    works_with("datatrove", version("datatrove"), "filtering and deduplication before prepare")
    stories = [story(seed) for seed in range(40)]
    near = [f"{text} Copied." for text in stories[:10]]
    junk = ["buy now " * 200, "too short", "# # # ! ! ! " * 60]
    write_jsonl(tmp_path / "texts" / "a.jsonl", stories)
    write_jsonl(tmp_path / "texts" / "b.jsonl", near + junk)
    done = run_example("texts", "work", "--out=data", "--val_tokens=500", folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    files = (tmp_path / "work" / "kept").glob("*.jsonl")
    lines = [line for path in files for line in path.read_text().splitlines()]
    kept = [json.loads(line)["text"] for line in lines]
    assert len(kept) == 40
    assert all((text in kept) != (copy in kept) for text, copy in zip(stories, near, strict=False))
    assert set(stories[10:]) < set(kept)

    assert verify(tmp_path / "data") == []
    ids = np.concatenate([np.load(path) for path in sorted((tmp_path / "data").glob("*.npy"))])
    documents = np.split(ids, np.flatnonzero(ids == END_OF_TEXT)[1:])
    assert sorted(GPT2.decode(ids[1:].tolist()) for ids in documents) == sorted(kept)


def test_a_typo_is_rejected_before_the_work_and_text_of_which_nothing_is_left(tmp_path):
    write_jsonl(tmp_path / "texts" / "a.jsonl", [story(1)])
    done = run_example("texts", "work", "--out=data", "--val_token=500x", folder=tmp_path)
    assert done.returncode == 2
    assert not (tmp_path / "work").exists()
    for folder, says in (("none", "no .jsonl files"), ("junk", "no document passes the rules")):
        if folder == "junk":
            write_jsonl(tmp_path / "junk" / "a.jsonl", ["too short"])
        done = run_example(folder, "work", "--out=data", folder=tmp_path)
        assert done.returncode != 0
        assert says in done.stderr.splitlines()[-1]
        assert not (tmp_path / "data").exists()
