"""hf:NAME through the datasets library: here a folder of its own, so that nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpora import TEXTS, expected_stream, run_prepare, snapshot, stream_of
from gpt2lab.data.prepare import encode, sources, write
from gpt2lab.data.prepare.encode import Place
from gpt2lab.data.prepare.pipeline import Sizes, prepare
from gpt2lab.data.prepare.sources import open_source
from gpt2lab.errors import DataError, SourceLostError

MANY = [f"{i} {TEXTS[i % len(TEXTS)]}" for i in range(240)]


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a dataset of four files; its bookmarks are close together."""
    monkeypatch.setattr(sources, "_BOOKMARK_EVERY", 7)
    monkeypatch.setattr(encode, "_BATCH_CHARS", 700)
    monkeypatch.setattr(write, "SMALLEST_LAST_SHARD", 100)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "dataset"
    folder.mkdir()
    for i in range(4):
        table = pa.table({"id": range(60), "text": MANY[60 * i : 60 * (i + 1)]})
        pq.write_table(table, folder / f"part-{i}.parquet", row_group_size=20)
    return f"hf:{folder}"


def test_a_dataset_is_streamed_in_its_order(dataset: str, tmp_path: Path) -> None:
    run_prepare(dataset, tmp_path / "out", val_tokens=300)
    assert stream_of(tmp_path / "out") == expected_stream(MANY)


def test_parts_of_a_dataset_are_disjoint_and_together_the_whole(
    dataset: str, tmp_path: Path
) -> None:
    found: list[int] = []
    for i in (1, 2):
        run_prepare(dataset, tmp_path / f"part{i}", part=(i, 2), val_tokens=300)
        found += stream_of(tmp_path / f"part{i}")
    assert sorted(found) == sorted(expected_stream(MANY))


def test_an_interrupted_stream_goes_on_from_a_bookmark_and_not_from_the_beginning(
    dataset: str, tmp_path: Path
) -> None:
    source = open_source(dataset, text_column="text")
    marked = [(n, d) for n, d in enumerate(source.documents(None)) if getattr(d, "bookmark", None)]
    assert len(marked) > 20
    for number, document in marked[:: len(marked) // 5]:
        assert not isinstance(document, DataError)
        bookmark = json.loads(json.dumps(document.bookmark))
        rest = [
            "".join(d.blocks) for d in source.documents(bookmark) if not isinstance(d, DataError)
        ]
        assert rest == MANY[number:]


def test_a_lost_connection_keeps_what_was_done(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = Sizes(shard_tokens=700, val_tokens=300)
    prepare(open_source(dataset, text_column="text"), tmp_path / "straight", sizes)
    original = sources._document
    read: list[str] = []

    def lossy(row: Any, text_column: str, where: str, bookmark: Any = None) -> Any:
        read.append(where)
        if len(read) == 150:
            raise ConnectionError("the network is gone")
        return original(row, text_column, where, bookmark)

    with monkeypatch.context() as patch:
        patch.setattr(sources, "_document", lossy)
        with pytest.raises(
            SourceLostError,
            match=r"network is gone.*finished shards are kept in .*the same command",
        ):
            prepare(
                open_source(dataset, text_column="text"), tmp_path / "out", sizes, num_workers=1
            )
        lost, _ = len(read), read.clear()
        prepare(open_source(dataset, text_column="text"), tmp_path / "out", sizes, num_workers=1)
    assert lost == 150
    assert len(read) < 200  # of 240: the first were not read again
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "straight")


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("hf:no/such-dataset", "text", r"hf:no/such-dataset: cannot be read \(.*\)$"),
        (
            None,
            "content",
            r"row 0: no column 'content' .it has id, text.; give another --text_column",
        ),
    ],
)
def test_a_dataset_that_cannot_be_used_is_one_line(
    dataset: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str | None,
    column: str,
    message: str,
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries for long
    with pytest.raises(DataError, match=message) as rejection:
        run_prepare(name or dataset, tmp_path / "out", text_column=column)
    assert "\n" not in str(rejection.value)
    assert not list(tmp_path.glob("out*"))


def test_subsets_of_fineweb_edu_have_folders_of_their_own() -> None:
    names = {}
    for subset in (None, "sample-10BT", "sample-100BT", "full"):
        source = open_source("fineweb-edu", text_column="text", subset=subset)
        names[subset] = (source.name, source.origin.rpartition(", ")[2])
    assert names[None] == names["sample-10BT"] == ("fineweb_edu", "sample-10BT")
    assert names["sample-100BT"] == ("fineweb_edu_100bt", "sample-100BT")
    assert names["full"] == ("fineweb_edu_full", "default")
    with pytest.raises(DataError, match="only fineweb-edu and hf:NAME have subsets"):
        open_source("python-stdlib", text_column="text", subset="x")


def test_a_place_survives_the_journal() -> None:
    place = Place({"row": 7, "state": {"a": [1, None]}}, chunks=3, bad=1, empty=2)
    assert Place(**json.loads(json.dumps(place.__dict__))) == place
