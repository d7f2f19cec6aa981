"""Data preparation by several processes, in parts, and interrupted: the bytes are those of one undisturbed process."""

import errno
import fcntl
import gzip
import hashlib
import json
import os
import signal
import struct
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import corpora
import launch
from corpora import MANY, assert_divided, ids_of, prepare_parts, run_prepare, snapshot, write_jsonl
from gpt2lab.data.manifest import write_manifest
from gpt2lab.data.prepare import encode, pipeline, readers, sources, write
from gpt2lab.data.prepare.assemble import merge
from gpt2lab.data.prepare.encode import EncodedChunks
from gpt2lab.data.prepare.groups import Share
from gpt2lab.data.prepare.readers import BadRecordsError, read
from gpt2lab.data.prepare.sources import open_source
from gpt2lab.data.shards import open_data
from gpt2lab.data.verify import compare_sources
from gpt2lab.errors import DataError, SaveError
from gpt2lab.tokenizers.interface import Tokenizer


@pytest.fixture
def small_steps(monkeypatch) -> None:
    """Make batches and remainders small, so that a small corpus has many of them."""
    monkeypatch.setattr(encode, "_BATCH_CHARS", 700)
    monkeypatch.setattr(write, "SMALLEST_LAST_SHARD", 300)


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Return a folder with all kinds of files, some of them packed, with empty documents among the others."""
    folder = tmp_path / "corpus"
    write_jsonl(folder / "a.jsonl", [*MANY[:100], "", *MANY[100:150]])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress((_lines(MANY[150:250])).encode()))
    with pa.output_stream(str(folder / "c.jsonl.zst"), compression="zstd") as file:
        file.write(_lines(MANY[250:350]).encode())
    for i, text in enumerate(MANY[350:]):
        (folder / f"d_{i:03d}.txt").write_text(text)
    (folder / "e.txt").write_text("")
    return folder


def _lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.mark.usefixtures("small_steps")
def test_the_number_of_processes_changes_no_byte(corpus, tmp_path):
    """Packed files are read as if they were not, and empty documents are left out."""
    sizes = {"shard_tokens": 1500, "val_tokens": 700, "group_bytes": 9_000}
    for name, workers in (("one", 1), ("two", 2)):
        result = run_prepare(corpus, tmp_path / name, num_workers=workers, **sizes)
    assert result.total("documents") == len(MANY)
    assert result.manifest["left_out"] == {"bad": 0, "empty": 2}
    assert snapshot(tmp_path / "two") == snapshot(tmp_path / "one")
    assert len(snapshot(tmp_path / "one")) > 8
    assert_divided(tmp_path / "one", MANY)


def _die_within_the_answer(pipe: Connection) -> None:
    pipe.recv()
    os.write(pipe.fileno(), struct.pack("!i", 1000) + b"a few bytes of the thousand")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_script_that_prepares_is_not_run_again_by_its_workers(corpus, tmp_path):
    call = f"run_prepare({str(corpus)!r}, Path({str(tmp_path / 'out')!r}), num_workers=2)"
    lines = ("from pathlib import Path", "from corpora import run_prepare", "print('began')", call)
    (tmp_path / "script.py").write_text("\n".join(lines))
    folders = f"{launch.REPOSITORY / 'src'}:{launch.REPOSITORY / 'tests'}"
    done = launch.worked(launch.python(tmp_path / "script.py", PYTHONPATH=folders))
    assert done.stdout.splitlines().count("began") == 1
    assert (tmp_path / "out" / "shards.json").exists()


def test_a_worker_killed_in_its_answer_ends_the_work_in_one_line(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "_work", _die_within_the_answer)
    with pytest.raises(DataError, match="a tokenizing process died"):
        run_prepare(corpus, tmp_path / "out", num_workers=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("small_steps")
def test_an_interrupted_preparation_goes_on_where_it_stopped(corpus, tmp_path, monkeypatch):
    sizes = {"shard_tokens": 1500, "val_tokens": 700, "group_bytes": 5_000}
    run_prepare(corpus, tmp_path / "straight", **sizes)
    tokens: list[int] = []
    original = encode.encode_chunks

    def failing(chunks: list[encode.TextChunk], tokenizer: Tokenizer) -> EncodedChunks:
        found = original(chunks, tokenizer)
        tokens.append(len(found.ids))
        if sum(tokens) > limit:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(encode, "encode_chunks", failing)
    total = 0
    for limit in (5000, 6000, 5500, 10**9):
        tokens.clear()
        if limit < 10**9:
            kept = r"\d of \d+ groups are kept in .*out.partial"
            with pytest.raises(KeyboardInterrupt, match=kept):
                run_prepare(corpus, tmp_path / "out", **sizes)
            assert not (tmp_path / "out").exists()
            with pytest.raises(DataError, match="preparation is not finished; repeat its command"):
                open_data(tmp_path / "out.partial", vocab_size=50304)
        else:
            run_prepare(corpus, tmp_path / "out", **sizes)
        total += sum(tokens)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "straight")
    groups = json.loads((tmp_path / "out" / "shards.json").read_text())["groups"]
    whole = len(corpora.expected_stream(MANY))
    assert len(groups) > 6
    assert whole < total < whole * (1 + 3 * 2 / len(groups))  # a group each is done again


@pytest.mark.usefixtures("small_steps")
def test_unfinished_work_of_another_command_is_rejected_and_kept(corpus, tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "assemble", Mock(side_effect=full))
        with pytest.raises(SaveError, match=r"out: cannot be written \(No space left on device\)"):
            run_prepare(corpus, tmp_path / "out", group_bytes=9_000)
    before = snapshot(tmp_path)
    with pytest.raises(DataError, match="unfinished work of another command line, source"):
        run_prepare(corpus, tmp_path / "out", group_bytes=9_001)
    assert snapshot(tmp_path) == before
    run_prepare(corpus, tmp_path / "out", group_bytes=9_000)
    assert_divided(tmp_path / "out", MANY)


def test_a_full_disk_leaves_nothing_and_two_preparations_do_not_mix(corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("FAULT", "data.before_rename:enospc@0")  # before the first group
        with pytest.raises(SaveError, match=r"out: cannot be written \(No space"):
            run_prepare(corpus, tmp_path / "out")
    assert os.listdir(tmp_path) == ["corpus"]
    (tmp_path / "out.partial").mkdir()
    with open(tmp_path / "out.partial" / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"out\.partial: another process is preparing"):
            run_prepare(corpus, tmp_path / "out")
    run_prepare(corpus, tmp_path / "out")


def _replaced(path: Path) -> None:
    """Put another file of the same size in its place, as `cp -p`, `rsync -t` or a restored archive do."""
    other, old = path.with_name(f".{path.name}.other"), path.stat()
    other.write_bytes(path.read_bytes().replace(b"quick", b"QUICK").replace(b"fox", b"FOX"))
    os.utime(other, (1, old.st_mtime - 10**6))
    os.replace(other, path)


def _grown(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b'{"text": "more"}\n')


def _rewritten(path: Path) -> None:
    """Give a file other text and its old times again; only ctime tells."""
    old = path.stat()
    path.write_bytes(path.read_bytes().replace(b"fox", b"FOX"))
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "more"), [(_grown, {}), (_replaced, {"max_tokens": 3000}), (_rewritten, {})]
)
def test_a_file_that_changes_while_it_is_read_is_named(corpus, tmp_path, monkeypatch, change, more):
    original, times = encode.encode_chunks, iter(range(10**9))

    def changing(chunks: list[encode.TextChunk], tokenizer: Tokenizer) -> EncodedChunks:
        if next(times) == 1:
            change(corpus / "a.jsonl")
        return original(chunks, tokenizer)

    monkeypatch.setattr(encode, "_BATCH_CHARS", 700)
    monkeypatch.setattr(encode, "encode_chunks", changing)
    with pytest.raises(DataError, match=r"a\.jsonl: changed while it was read"):
        run_prepare(corpus, tmp_path / "out", num_workers=1, **more)
    assert os.listdir(tmp_path) == ["corpus"]
    run_prepare(corpus, tmp_path / "out", num_workers=1, **more)


@pytest.mark.parametrize(("name", "change"), [("a.jsonl", _replaced), ("c.parquet", _rewritten)])
def test_what_was_killed_reads_a_changed_file_again(tmp_path, monkeypatch, name, change):
    """The groups before the change are dropped where their file is another: no byte of the old text is left."""
    folder = tmp_path / "corpus"
    write_jsonl(folder / "a.jsonl", MANY)
    write_jsonl(folder / "b.jsonl", MANY[::-1])
    table = pa.table({"text": [f"{text}." for text in MANY]})
    pq.write_table(table, folder / "c.parquet", row_group_size=50, compression=None)
    sizes = {"shard_tokens": 2000, "val_tokens": 700, "group_bytes": 9_000}
    groups = tmp_path / "out.partial" / "groups"
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "assemble", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_prepare(folder, tmp_path / "out", **sizes)
        kept = {path.name: path.stat().st_ctime_ns for path in groups.iterdir()}
        change(folder / name)
        with pytest.raises(KeyboardInterrupt):
            run_prepare(folder, tmp_path / "out", **sizes)
    again = {path.name for path in groups.iterdir() if path.stat().st_ctime_ns != kept[path.name]}
    assert 1 <= len(again) < len(kept)
    run_prepare(folder, tmp_path / "out", **sizes)
    run_prepare(folder, tmp_path / "straight", **sizes)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "straight")


@pytest.mark.parametrize(
    ("states", "change"),
    [("kept", _rewritten), ("lost", _replaced), ("[1]", _replaced), ("5", _replaced)],
)
def test_a_complete_folder_knows_its_sources_by_their_bytes(corpus, tmp_path, states, change):
    out, seen = tmp_path / "out", tmp_path / "out" / ".sources.json"
    run_prepare(corpus, out, group_bytes=9_000)
    before = json.loads((out / "shards.json").read_text())
    for path in corpus.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert path.name == "a.jsonl" or digest in str(before["groups"])
    if states == "lost":
        seen.unlink()
    elif states != "kept":  # of another machine, or edited
        seen.write_text(json.dumps(dict.fromkeys(json.loads(seen.read_text()), json.loads(states))))
    assert run_prepare(corpus, out, group_bytes=9_000) is None
    os.utime(corpus / "d_003.txt")  # other times, the same text
    assert run_prepare(corpus, out, group_bytes=9_000) is None
    assert compare_sources(out, open_source(str(corpus), text_column="text")) == []
    change(corpus / "d_003.txt")
    (named,) = compare_sources(out, open_source(str(corpus), text_column="text"))
    assert named.startswith("d_003.txt: ")
    with pytest.raises(DataError, match=r"d_003\.txt"):
        run_prepare(corpus, out, group_bytes=9_000)
    run_prepare(corpus, tmp_path / "new", group_bytes=9_000)
    after = json.loads((tmp_path / "new" / "shards.json").read_text())
    assert after["content"] != before["content"]
    assert after["fingerprint"] != before["fingerprint"]


def test_a_folder_of_an_earlier_version_is_known_by_names_and_sizes(corpus, tmp_path):
    """It has no hashes of the sources' bytes, and its fingerprint, by which resumes know it, stays."""
    run_prepare(corpus, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "shards.json").read_text())
    del manifest["content"]
    manifest["request"]["content"] = manifest["request"].pop("listing")
    (tmp_path / "out" / "shards.json").unlink()
    write_manifest(tmp_path / "out", manifest)
    assert open_data(tmp_path / "out", vocab_size=50304).fingerprint == manifest["fingerprint"]
    assert run_prepare(corpus, tmp_path / "out") is None
    with pytest.raises(DataError):
        compare_sources(tmp_path / "out", open_source(str(corpus), text_column="text"))


@pytest.mark.usefixtures("small_steps")
def test_skip_bad_leaves_out_and_counts_what_cannot_be_read(tmp_path):
    folder = tmp_path / "corpus"
    write_jsonl(folder / "a.jsonl", MANY[:100])
    with open(folder / "a.jsonl", "ab") as file:
        file.write(b'{"text": oops}\n{"text": 5}\n{"other": "x"}\n{"text": "caf\xe9"}\n')
        file.write(_lines(MANY[100:200]).encode())
    (folder / "b.txt").write_bytes(b"good until here \xff")
    (folder / "c.parquet").write_bytes(b"PAR1 not really")
    whole = gzip.compress(_lines(MANY[200:210]).encode())
    (folder / "d.jsonl.gz").write_bytes(whole[:-9])
    with pytest.raises(DataError, match=r"a\.jsonl line 101: not JSON.*; --skip_bad skips"):
        run_prepare(folder, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()
    result = run_prepare(folder, tmp_path / "out", skip_bad=True)
    assert result.manifest["left_out"] == {"bad": 4 + 1 + 1 + 1, "empty": 0}
    found = {x for split in ("train", "val") for x in corpora.documents_of(tmp_path / "out", split)}
    assert found >= set(corpora.encoded(MANY[:200]))  # some of the truncated archive may follow


def test_a_bad_value_of_a_parquet_file_costs_its_own_row(tmp_path):
    """A value that is not text, one that is null, and a row group whose bytes are damaged."""
    texts: list[bytes | None] = [text.encode() for text in MANY[:300]]
    texts[7], texts[250] = b"caf\xe9", None
    column = pa.array(texts, pa.binary()).view(pa.string())
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"text": column}), path, row_group_size=100, use_dictionary=False)
    place = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 40] = bytes(40)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"c\.parquet row 8: not UTF-8"):
        run_prepare(path, tmp_path / "out")
    result = run_prepare(path, tmp_path / "out", skip_bad=True)
    assert result.manifest["left_out"] == {"bad": 1 + 1 + 100, "empty": 0}
    (file,) = open_source(str(path), text_column="text").files
    found = read(Share(file, 2, 3), text_column="text")
    bad = [str(one) for one in found if isinstance(one, BadRecordsError)]
    assert bad == [f"{path} row 251: column 'text' holds NoneType, not text"]
    assert_divided(tmp_path / "out", [*MANY[:7], *MANY[8:100], *MANY[200:250], *MANY[251:300]])


def test_a_shard_that_cannot_be_linked_is_copied_and_flushed(tmp_path, monkeypatch):
    """As between two disks: the working folder, which it is copied from, is deleted next."""
    flushed: list[str] = []
    monkeypatch.setattr(os, "link", lambda *_: os.rename("nowhere", "x"))
    monkeypatch.setattr(
        os, "fsync", lambda fd: flushed.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
    )
    run_prepare(write_jsonl(tmp_path / "a.jsonl", corpora.TEXTS), tmp_path / "out", val_tokens=100)
    assert {path.name for path in (tmp_path / "out").glob("*_train_*")} <= set(flushed)


@pytest.mark.slow
def test_documents_longer_than_a_shard_and_than_a_piece(tmp_path):
    text = "".join(MANY) * 60
    (tmp_path / "long.txt").write_text(text)
    assert len(text) > 2 * 2**20
    how = {"shard_tokens": 100_000, "num_workers": 2}
    result = run_prepare(tmp_path / "long.txt", tmp_path / "out", **how)
    assert result.total("documents") == 1
    found = ids_of(tmp_path / "out", "train") + ids_of(tmp_path / "out", "val")
    assert found == corpora.expected_stream([text])


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("more", [{}, {"max_tokens": 4002, "val_tokens": 401}])
def test_merged_parts_are_the_work_of_one_machine_byte_for_byte(corpus, tmp_path, more):
    sizes = {"shard_tokens": 1500, "val_tokens": 600, "group_bytes": 5_000} | more
    run_prepare(corpus, tmp_path / "one", **sizes)
    for count in (2, 3):
        parts = prepare_parts(corpus, tmp_path / str(count), count, **sizes)
        merge(tmp_path / f"of {count}", parts[::-1])
        assert snapshot(tmp_path / f"of {count}") == snapshot(tmp_path / "one")
    with pytest.raises(DataError, match="part 1/3: "):  # of one group
        run_prepare(corpus, tmp_path / "out", part=(1, 3))


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("case", ["missing", "twice", "whole", "other", "damaged", "there"])
def test_parts_that_do_not_fit_are_rejected_and_nothing_is_left(corpus, tmp_path, case, wording):
    parts = prepare_parts(corpus, tmp_path, 3, shard_tokens=1500, group_bytes=5_000)
    given = list(parts)
    if case == "missing":
        del given[1]
    if case == "twice":
        given[2] = parts[0]
    if case == "whole":
        run_prepare(corpus, tmp_path / "single")
        given[0] = tmp_path / "single"
    if case == "other":
        given[1] = prepare_parts(corpus, tmp_path / "others", 3, group_bytes=6_000)[1]
    if case == "damaged":
        path = next(parts[1].glob("*_train_000000.npy"))
        np.save(path, np.load(path)[::-1].copy())
    if case == "there":
        (tmp_path / "out").mkdir()
    before = snapshot(tmp_path)
    with pytest.raises(DataError, check=wording):
        merge(tmp_path / "out", given)
    assert snapshot(tmp_path) == before


# hf:NAME through the datasets library: here a folder of its own, so that nothing is downloaded.
ROWS = [f"{i} {corpora.TEXTS[i % len(corpora.TEXTS)]}" for i in range(240)]


@pytest.fixture
def dataset(tmp_path) -> str:
    """Return the name of a dataset of four files."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    for i in range(4):
        table = pa.table({"id": range(60), "text": ROWS[60 * i : 60 * (i + 1)]})
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
    assert_divided(tmp_path / "one", ROWS)
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
