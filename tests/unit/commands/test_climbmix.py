"""nanochat's shuffled ClimbMix: the first files train, the last one is the validation split. Nothing is downloaded."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpora import documents_of, encoded, expected_stream, snapshot
from gpt2lab.commands.prepare_data import PrepareData, prepare
from gpt2lab.data.manifest import read_manifest
from gpt2lab.data.prepare import sources
from gpt2lab.data.prepare.assemble import merge
from gpt2lab.data.prepare.pipeline import learning_texts
from gpt2lab.data.prepare.sources import open_source
from gpt2lab.errors import DataError

NUMBERS = (0, 1, 2, 3, 6542)


def texts_of(number: int) -> list[str]:
    return [f"Document {row} of file {number}, as {row * 37 % 11} others." for row in range(30)]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Return files with the schema and the names of nanochat's; `climbmix` is this folder."""
    folder = tmp_path / "set"
    folder.mkdir()
    for number in NUMBERS:
        pq.write_table(
            pa.table({"text": texts_of(number)}),
            folder / f"shard_{number:05d}.parquet",
            **{"row_group_size": 8, "use_dictionary": False, "write_statistics": False},
            **{"compression": "zstd", "compression_level": 3},
        )
    monkeypatch.setattr(sources, "CLIMBMIX", str(folder))
    return folder


def prepared(source: str | Path, out: Path, **flags: object) -> Path:
    return prepare(PrepareData(str(source), out, num_workers=1, **flags))  # type: ignore[arg-type]


def test_the_first_files_train_and_the_last_one_validates(folder, tmp_path):
    out = prepared("climbmix", tmp_path / "out", num_files=2)
    assert documents_of(out, "train") == encoded([*texts_of(0), *texts_of(1)])
    assert documents_of(out, "val") == encoded(texts_of(6542))
    assert read_manifest(out)["split"]["held_out"] == "file shard_06542.parquet"
    all_files = prepared("climbmix", tmp_path / "all")
    every = [text for number in NUMBERS[:-1] for text in texts_of(number)]
    assert documents_of(all_files, "train") == encoded(every)
    named = {"val_file": "shard_06542.parquet", "num_files": 2}
    again = prepared(folder, tmp_path / "again", **named)
    assert documents_of(again, "val") == encoded(texts_of(6542))
    learned = open_source("climbmix", text_column="text", num_files=2)
    texts = learning_texts(learned, max_bytes=10**6, cuts=None)
    assert sorted(texts) == sorted([*texts_of(0), *texts_of(1)])
    # Limits in tokens take the first ones of each side.
    out = prepared("climbmix", tmp_path / "few", num_files=1, max_tokens=300, val_tokens=200)
    for split, number, count in (("train", 0, 300), ("val", 6542, 200)):
        found = [token for document in documents_of(out, split) for token in document]
        assert found == expected_stream(texts_of(number))[:count]
    (folder / "shard_06542.parquet").unlink()
    with pytest.raises(DataError, match=r"^val_file shard_06542\.parquet: .* has no such file; "):
        prepared("climbmix", tmp_path / "without")


def test_parts_are_the_same_bytes(folder, tmp_path):
    how = {"num_files": 3, "group_bytes": 1500}
    prepared("climbmix", tmp_path / "one", **how)
    for number in (1, 2):
        prepared("climbmix", tmp_path / f"part{number}", part=f"{number}/2", **how)
    merge(tmp_path / "whole", [tmp_path / "part1", tmp_path / "part2"])
    assert snapshot(tmp_path / "whole") == snapshot(tmp_path / "one")


@pytest.mark.parametrize(
    ("source", "flags"),
    [
        *(("climbmix", {"num_files": 5}), ("climbmix", {"subset": "x"}), ("climbmx", {})),
        ("climbmix", {"val_file": "shard_00009.parquet"}),
        ("set/shard_00000.parquet", {"val_file": "shard_00000.parquet"}),
    ],
    ids=str,
)
def test_what_is_unclear_is_one_line(folder, tmp_path, monkeypatch, source, flags, wording):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, check=wording):
        prepared(source, tmp_path / "out", **flags)
    assert not list(tmp_path.glob("out*"))
