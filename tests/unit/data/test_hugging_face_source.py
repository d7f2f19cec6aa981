"""hf:NAME through the datasets library: here a folder of its own, so that nothing is downloaded."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import launch
from corpora import TEXTS, assert_divided, run_prepare, snapshot
from gpt2lab.data.prepare import readers, sources
from gpt2lab.data.prepare.assemble import merge
from gpt2lab.data.prepare.sources import open_source
from gpt2lab.errors import DataError

MANY = [f"{i} {TEXTS[i % len(TEXTS)]}" for i in range(240)]


@pytest.fixture
def dataset(tmp_path) -> str:
    """Return the name of a dataset of four files."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    for i in range(4):
        table = pa.table({"id": range(60), "text": MANY[60 * i : 60 * (i + 1)]})
        pq.write_table(table, folder / f"part-{i}.parquet", row_group_size=20)
    return f"hf:{folder}"


def test_whole_files_are_dealt_out_to_parts(dataset, tmp_path, monkeypatch):
    read: list[str] = []
    original = readers._read_parquet

    def noted(share: readers.Share, *more: object) -> readers.Stream:
        read.append(share.file.name)
        return original(share, *more)  # type: ignore[arg-type]

    monkeypatch.setitem(readers._READERS, "parquet", noted)
    largest = max(path.stat().st_size for path in (tmp_path / "dataset").iterdir())
    sizes = {"val_tokens": 300, "group_bytes": largest}
    run_prepare(dataset, tmp_path / "one", **sizes)
    assert_divided(tmp_path / "one", MANY)
    for i in (1, 2):
        read.clear()
        run_prepare(dataset, tmp_path / f"part{i}", part=(i, 2), **sizes)
        assert set(read) == {f"part-{2 * i - 2}.parquet", f"part-{2 * i - 1}.parquet"}
    merge(tmp_path / "whole", [tmp_path / "part1", tmp_path / "part2"])
    assert snapshot(tmp_path / "whole") == snapshot(tmp_path / "one")


def test_a_lost_connection_keeps_the_groups_that_are_done(dataset, tmp_path, monkeypatch):
    sizes = {"val_tokens": 300, "group_bytes": 3_000}
    run_prepare(dataset, tmp_path / "straight", **sizes)
    read: list[str] = []
    original = readers._read_row_group

    def lossy(file: object, group: int, share: readers.Share, *more: object) -> readers.Stream:
        read.append(share.file.name)
        if len(read) == 8:
            raise ConnectionError("the network is gone")
        return original(file, group, share, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(readers, "_read_row_group", lossy)
    with pytest.raises(DataError, match=r"network is gone.*groups are kept in .*the same command"):
        run_prepare(dataset, tmp_path / "out", num_workers=1, **sizes)
    first, _ = len(read), read.clear()
    run_prepare(dataset, tmp_path / "out", num_workers=1, **sizes)
    assert first + len(read) < 2 * 12 - 4  # row groups: those that were done are not read again
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "straight")


@pytest.mark.parametrize(("failures", "attempts"), [(0, 1), (2, 3), (999, 6)])
def test_a_hub_that_fails_is_asked_again_but_not_for_ever(failures, attempts):
    done = launch.python(launch.WORKERS / "hub_outage.py", failures)
    *said, requests = done.stdout.splitlines()
    assert int(requests) == attempts
    if failures < 999:
        assert said == ["text 0", "text 1", "text 2"]
    else:
        (line,) = said
        assert line.startswith("SourceLostError: hf://datasets/org/set@")
        assert "/a.jsonl: can no longer be read (" in line


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("hf:no/such-dataset", "text", r"hf:no/such-dataset: the Hugging Face Hub cannot"),
        (None, "content", r"part-0\.parquet: no column 'content'; it has id, text"),
    ],
)
def test_an_unusable_dataset_is_one_line(dataset, tmp_path, monkeypatch, name, column, message):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries for long
    with pytest.raises(DataError, match=message) as rejection:
        run_prepare(name or dataset, tmp_path / "out", text_column=column)
    assert "\n" not in str(rejection.value)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("subset", "folder", "config"),
    [
        (None, "fineweb_edu", "sample-10BT"),
        ("sample-100BT", "fineweb_edu_100bt", "sample-100BT"),
        ("full", "fineweb_edu_full", "default"),
    ],
)
def test_subsets_are_of_fineweb_edu_and_have_folders(monkeypatch, subset, folder, config):
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(sources, "_hugging_face", lambda *given: asked.append(given))
    open_source("fineweb-edu", text_column="text", subset=subset, revision="abc")
    assert asked == [(sources.FINEWEB_EDU, config, folder, "edufineweb", "text", "abc")]
    for flag in ("subset", "revision"):
        said = f"--{flag} x: python-stdlib has none; fineweb-edu and hf:"
        with pytest.raises(DataError, match=said):
            open_source("python-stdlib", text_column="text", **{flag: "x"})
