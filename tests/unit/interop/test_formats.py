"""Token files of other programs, written from their specifications: read in place, or rejected by name."""

import hashlib
import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import launch
import token_files
from corpora import TEXTS, snapshot
from edited_manifests import assert_edits_are_one_line_or_open, edit
from gpt2lab.commands.data import tokens_of_step
from gpt2lab.data.order import Order
from gpt2lab.data.shards import document_marks, open_data, read_document_ends
from gpt2lab.data.verify import measure, verify
from gpt2lab.data.windows import WindowReader, hash_windows
from gpt2lab.errors import ConfigError, DataError, GPT2LabError, SaveError
from gpt2lab.evaluation.validation import divide_windows
from gpt2lab.interop.import_shards import ImportOptions, import_folder
from gpt2lab.interop.token_files import Place
from gpt2lab.tokenizers.bpe import train_bpe
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, GPT2
from tiny import CONTEXT, flip_bit, write_shards
from token_files import FORMATS, documents, flat, llmc_shards, made_splits, write_llmc, write_raw
from whole_run import Run


@pytest.mark.parametrize("name", FORMATS)
def test_windows_are_the_ids_that_were_written(tmp_path, name):
    write, layout, dtype = FORMATS[name]
    splits = made_splits("after" if name == "datatrove ids alone" else "before")
    wanted = write(tmp_path, splits)
    before = snapshot(tmp_path)
    manifest = import_folder(tmp_path, wanted)
    after = snapshot(tmp_path)
    assert {path: after[path] for path in before} == before
    assert after.keys() - before.keys() == {"shards.json"}
    assert manifest.get("layout", "npy") == layout
    data = open_data(tmp_path, vocab_size=50304)
    for split, parts in splits.items():
        ids = flat(token_files.joined(parts))
        assert data.tokens(split) == len(ids)
        assert {shard.dtype for shard in data.splits[split]} == {dtype}
        whole: list[int] = []
        for number, shard in enumerate(data.splits[split]):
            order = Order([shard.tokens], context_length=CONTEXT, shuffle="none", seed=0)
            reader = WindowReader(data.splits[split], context_length=CONTEXT, id_limit=50257)
            _, offsets = order.locate(np.arange(order.windows_per_epoch))
            windows = reader.read(np.full(len(offsets), number), offsets)
            assert windows.dtype == np.dtype(dtype)
            start = len(whole)
            whole += ids[start : start + shard.tokens]
            for offset, window in zip(offsets.tolist(), windows.tolist(), strict=True):
                begin = start + offset
                assert window == ids[begin : begin + CONTEXT + 1]
            reader.close()
        assert whole == ids
    assert verify(tmp_path) == []


@pytest.mark.parametrize("name", [n for n in FORMATS if n.startswith(("datatrove", "Meg"))])
@pytest.mark.parametrize("place", ["before", "after", "none"])
def test_an_index_tells_where_the_end_of_text_stands(tmp_path, name, place):
    """Where no id stands between documents, the index itself gives them."""
    if name == "datatrove ids alone":
        return
    splits = made_splits(place)
    wanted = FORMATS[name][0](tmp_path, splits)
    manifest = import_folder(tmp_path, wanted)
    data = open_data(tmp_path, vocab_size=50304)
    is_known = wanted.tokenizer != "unknown"
    expected: Place = place if is_known else "none"
    assert data.end_of_text.place == expected
    assert data.end_of_text.id == (END_OF_TEXT if expected != "none" else None)
    made = token_files.joined(splits["val"])
    of_val = [file["documents"] for file in manifest["files"] if file["split"] == "val"]
    assert of_val == [len(made)]
    assert measure(tmp_path)["val"].lengths.tolist() == [len(document) for document in made]
    # Validation's error counts these documents.
    shards = data.splits["val"]
    order = Order([shards[0].tokens], context_length=CONTEXT, shuffle="none", seed=0)
    ends = [document_marks(shard, data.end_of_text.id) for shard in shards]
    parts = divide_windows(order, np.arange(order.windows_per_epoch), ends)
    assert parts.kind == "document"
    document_of = np.repeat(np.arange(len(made)), [len(document) for document in made])
    if expected == "before":  # <|endoftext|> as a target belongs to the document that it ends
        document_of = np.maximum(document_of - (np.array(flat(made)) == END_OF_TEXT), 0)
    counted = np.bincount(document_of[1 : 1 + order.windows_per_epoch * CONTEXT])
    targets = np.bincount(parts.unit, weights=parts.end - parts.begin)
    assert targets.tolist() == [count for count in counted.tolist() if count]


def test_ids_beyond_65535_are_read_whole(tmp_path):
    made = documents(40, 1, largest=128_256, place="none")
    write_llmc(tmp_path / "a_train.bin", made, magic=20240801, version=7)
    write_llmc(tmp_path / "a_val.bin", made[:9], magic=20240801, version=7)
    import_folder(tmp_path, token_files.UNKNOWN)
    data = open_data(tmp_path, vocab_size=None)
    reader = WindowReader(data.splits["train"], context_length=CONTEXT, id_limit=128_256)
    windows = reader.read(np.array([0]), np.array([32]))
    assert windows.tolist() == [flat(made)[32 : 32 + CONTEXT + 1]]
    assert hash_windows(windows) == hash_windows(np.array(windows.tolist(), np.uint32))
    assert hash_windows(windows) != hash_windows(windows.astype(np.uint16))
    with pytest.raises(DataError, match=r"token id \d{6}, but ids must be below"):
        open_data(tmp_path, vocab_size=50304)
    assert measure(tmp_path)["train"].largest_id == max(flat(made))


Spoil = Callable[[Path], object]


def edited(name: str, change: Callable[[bytes], bytes]) -> Spoil:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def cut(name: str, count: int = 1) -> Spoil:
    return edited(name, lambda old: old[:-count])


def patch(name: str, at: int, more: bytes) -> Spoil:
    return edited(name, lambda old: old[:at] + more + old[at + len(more) :])


def write(name: str, content: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content)


def remove(*names: str) -> Spoil:
    return lambda folder: [(folder / name).unlink() for name in names]


def link(name: str) -> Spoil:
    return lambda folder: (remove(name)(folder), (folder / name).symlink_to("gone"))


def _swap_two_sequences(raw: bytes) -> bytes:
    (sequences,) = struct.unpack_from("<Q", raw, 18)
    at = 34 + 4 * sequences
    one, two = raw[at + 8 : at + 16], raw[at + 16 : at + 24]
    return raw[: at + 8] + two + one + raw[at + 24 :]


LLMC, DS, MEG = "fineweb_train_000002.bin", "3_shuffled.ds", "train_text_document.idx"
IGNORED = struct.pack("<i", -100)  # by torch
CASES: dict[str, tuple[str, Spoil]] = {
    "llm.c cut in its ids": ("llm.c", cut(LLMC, 2)),
    "llm.c cut in its header": ("llm.c", write(LLMC, struct.pack("<iii", 20240520, 1, 9))),
    "llm.c too long": ("llm.c", edited(LLMC, lambda old: old + b"\0\0")),
    "llm.c of another version": ("llm.c", patch(LLMC, 4, struct.pack("<i", 2))),
    "llm.c of no tokens": ("llm.c", write(LLMC, struct.pack("<256i", 20240520, 1, *[0] * 254))),
    "llm.c of less than none": ("llm.c", patch(LLMC, 8, struct.pack("<i", -5))),
    "llm.c big-endian": ("llm.c", patch(LLMC, 0, struct.pack(">i", 20240520))),
    "llm.c evaluation": ("llm.c", patch(LLMC, 0, struct.pack("<i", 20240522))),
    "llm.c beside raw": ("llm.c", patch(LLMC, 0, struct.pack("<i", 77))),
    "llm.c with an id too large": ("llm.c", patch(LLMC, 1024, struct.pack("<H", 60_000))),
    "datatrove cut": ("datatrove", cut(DS, 2)),
    "datatrove cut within an id": ("datatrove", cut(DS, 1)),
    "datatrove index cut": ("datatrove", cut(f"{DS}.index", 3)),
    "datatrove index short": ("datatrove", cut(f"{DS}.index", 8)),
    "datatrove index of another": ("datatrove", patch(f"{DS}.index", 0, struct.pack("<Q", 2**40))),
    "datatrove metadata empty": ("datatrove", write(f"{DS}.metadata", b"")),
    "datatrove metadata odd": ("datatrove", write(f"{DS}.metadata", b"gpt2|3\n5\n")),
    "datatrove other width": ("datatrove", write(f"{DS}.metadata", b"gpt2|4\n5\n5 T")),
    "datatrove other tokenizer": ("datatrove", write(f"{DS}.metadata", b"bert-base|2\n5\n5 T")),
    "datatrove metadata is a broken link": ("datatrove", link(f"{DS}.metadata")),
    "datatrove with a loss mask": ("datatrove", write(f"{DS}.loss", b"\1")),
    "datatrove neither beside": ("datatrove", remove(f"{DS}.index", f"{DS}.metadata")),
    "Megatron cut": ("Megatron", cut("train_text_document.bin", 2)),
    "Megatron index cut": ("Megatron", cut(MEG, 8)),
    "Megatron index cut in its header": ("Megatron", write(MEG, b"MMIDIDX\0\0\1")),
    "Megatron index of something else": ("Megatron", patch(MEG, 0, b"PK")),
    "Megatron index is a broken link": ("Megatron", link(MEG)),
    "Megatron before MMIDIDX": ("Megatron", patch(MEG, 0, b"TNTIDX\0\0")),
    "Megatron of version 2": ("Megatron", patch(MEG, 9, b"\2")),
    "Megatron of int64": ("Megatron", patch(MEG, 17, b"\5")),
    "Megatron of floats": ("Megatron", patch(MEG, 17, b"\7")),
    "Megatron of type 9": ("Megatron", patch(MEG, 17, b"\x09")),
    "Megatron out of order": ("Megatron", edited(MEG, _swap_two_sequences)),
    "Megatron with negative ids": (
        *("Megatron int32, sequences within documents", patch("train_text.bin", 28, IGNORED)),
    ),
    "raw of 32 bits": ("nanoGPT", lambda f: write_raw(f / "train.bin", documents(30, 5), kind="I")),
    "raw of 64 bits": ("nanoGPT", lambda f: write_raw(f / "train.bin", documents(30, 5), kind="Q")),
    "raw of odd size": ("nanoGPT", cut("val.bin", 1)),
    "raw and empty": ("nanoGPT", write("val.bin", b"")),
    "raw with an id too large": ("nanoGPT", write("train.bin", b"\0\0\x60\xea")),
    "nothing": ("nanoGPT", remove("train.bin", "val.bin")),
    "no split": ("llm.c", lambda f: write_llmc(f / "fineweb_000007.bin", documents(9, 1))),
    "both splits": ("llm.c", lambda f: write_llmc(f / "train_val_7.bin", documents(9, 1))),
    "no validation": ("llm.c", remove("fineweb_val_000001.bin")),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_that_is_not_what_it_says_is_rejected_by_name(tmp_path, case, wording):
    name, spoil = CASES[case]
    folder = tmp_path / "d"
    folder.mkdir()
    wanted = FORMATS[name][0](folder, made_splits())
    spoil(folder)
    before = snapshot(folder)
    with pytest.raises(GPT2LabError, check=wording):
        import_folder(folder, wanted)
    assert snapshot(folder) == before


@pytest.mark.parametrize("name", FORMATS)
def test_no_damage_to_headers_raises_anything_but_one_line(tmp_path, name):
    place: Place = "after" if name == "datatrove ids alone" else "before"
    made = {"train": [documents(8, 1, place=place)], "val": [documents(6, 2, place=place)]}
    wanted = FORMATS[name][0](tmp_path, made)
    whole = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    rejected = 0
    for number in range(40):
        draw = random.Random(number)
        path = draw.choice(list(whole))
        raw = bytearray(whole[path])
        at = draw.randrange(min(len(raw), 100))
        damage = draw.choice([b"\xff" * 8, b"\0" * 8, draw.randbytes(1), draw.randbytes(4)])
        raw[at : at + len(damage)] = damage
        path.write_bytes(raw[: draw.choice([len(raw), len(raw), at])])
        try:
            import_folder(tmp_path, wanted)
            open_data(tmp_path, vocab_size=None)
            measure(tmp_path)
        except GPT2LabError as error:
            assert "\n" not in str(error)
            rejected += 1
        (tmp_path / "shards.json").unlink(missing_ok=True)
        path.write_bytes(whole[path])
    assert rejected > 5


WANTED: dict[str, tuple[str, dict[str, Any]]] = {
    "Megatron says no tokenizer": ("Megatron", {"tokenizer": None}),
    "llm.c of Llama 3 says another": ("llm.c of Llama 3", {"tokenizer": None}),
    "and is not GPT-2's": ("llm.c of Llama 3", {"tokenizer": "gpt2"}),
    "no such tokenizer": ("Megatron", {"tokenizer": "gpt3"}),
    "another width than the header's": ("llm.c", {"dtype": "uint32"}),
    "another width than the metadata's": ("datatrove", {"dtype": "uint32"}),
    "an offset where a header is": ("llm.c", {"format": "llm.c", "offset": 8}),
    "an offset within an id": ("nanoGPT", {"offset": 3}),
    "an offset beyond the end": ("nanoGPT", {"offset": 10**9}),
    "files that are not there": ("llm.c", {"val_files": ("x*",)}),
    "both sides": ("llm.c", {"val_files": ("*_000001.bin",), "train_files": ("*train*",)}),
    "all for validation": ("llm.c", {"val_files": ("*",)}),
    "another end-of-text id": ("llm.c", {"end_of_text_id": 0}),
    "no id before documents": ("llm.c of Llama 3", {"end_of_text": "before"}),
    "an id of no place": ("llm.c of Llama 3", {"end_of_text": "none", "end_of_text_id": 50256}),
    "an index that says otherwise": ("datatrove", {"end_of_text": "after"}),
    "no index and no word": ("datatrove ids alone", {"end_of_text": None}),
}


@pytest.mark.parametrize("case", WANTED)
def test_what_is_said_of_files_must_fit_them(tmp_path, case, wording):
    name, changes = WANTED[case]
    wanted = FORMATS[name][0](tmp_path, made_splits())
    with pytest.raises((DataError, ConfigError), check=wording):
        import_folder(tmp_path, ImportOptions(**{**vars(wanted), **changes}))
    assert not (tmp_path / "shards.json").exists()


def test_a_digit_that_is_no_number_is_part_of_a_name(tmp_path):
    """Between two numbers, ² alone would be taken for one."""
    for name in ("x1²10_train.bin", "x1²9_train.bin", "x1²1_val.bin"):
        token_files.write_raw(tmp_path / name, documents(2, 1))
    names = [file["name"] for file in import_folder(tmp_path)["files"]]
    assert names == ["x1²9_train.bin", "x1²10_train.bin", "x1²1_val.bin"]


def test_documents_that_end_in_two_ways_are_not_taken_for_one_and_empty_ones_omitted(tmp_path):
    np.array([0, 3, 3, 7], "<u8").tofile(tmp_path / "index")
    assert read_document_ends("datatrove", tmp_path / "index").tolist() == [3, 7]
    (tmp_path / "index").unlink()
    mixed = documents(20, 1, place="after") + documents(20, 2, place="none")
    token_files.write_datatrove(tmp_path / "train.ds", mixed)
    token_files.write_datatrove(tmp_path / "val.ds", mixed[:9])
    with pytest.raises(DataError, match="of 49 documents 0 begin and 29 end"):
        import_folder(tmp_path)
    import_folder(tmp_path, ImportOptions(end_of_text="none"))
    assert measure(tmp_path)["train"].lengths.tolist() == [len(document) for document in mixed]


def test_the_end_of_text_of_an_unknown_tokenizer_is_said(tmp_path):
    made = [[[7, *d] for d in documents(n, n, place="none")] for n in (20, 9)]
    for split, part in zip(("train", "val"), made, strict=True):
        write_llmc(tmp_path / f"{split}.bin", part, magic=20240801, version=7)
    before = ImportOptions(tokenizer="unknown", end_of_text="before", end_of_text_id=7)
    import_folder(tmp_path, before)
    assert open_data(tmp_path, vocab_size=50304).end_of_text.id == 7
    assert len(measure(tmp_path)["val"].lengths) == flat(made[1]).count(7)


def test_the_type_may_be_said_of_files_that_look_otherwise(tmp_path):
    """Ids below 16 at every second place are no proof: whoever knows better says so."""
    (tmp_path / "wide").mkdir()
    for split in ("train.bin", "val.bin"):
        write_raw(tmp_path / split, [[1000, 3] * 200])
        write_raw(tmp_path / "wide" / split, [[1000, 3] * 200], kind="Q")
    with pytest.raises(DataError, match="32-bit ids"):
        import_folder(tmp_path)
    import_folder(tmp_path, ImportOptions(dtype="uint16"))
    assert open_data(tmp_path, vocab_size=50304).tokens("train") == 400
    with pytest.raises(DataError, match="64-bit ids; write them again as uint32"):
        import_folder(tmp_path / "wide", ImportOptions(dtype="uint32"))
    with pytest.raises(DataError, match=f"after offset {10**30}; raw uint32"):
        import_folder(tmp_path / "wide", ImportOptions(dtype="uint32", offset=10**30))
    with pytest.raises(DataError, match="32-bit ids"):  # of a manifest that does not say it
        edit(tmp_path, lambda m: [(f.pop("dtype"), f.pop("offset")) for f in m["files"]])
        open_data(tmp_path, vocab_size=50304)


def test_what_is_recorded_of_existing_shards_is_what_it_always_was(tmp_path):
    """Runs over such folders find their data again by the fingerprint."""
    token_files.npy_shards(tmp_path, splits := made_splits())
    manifest = import_folder(tmp_path)
    assert manifest.keys() == {
        *("format", "dataset", "origin", "tokenizer", "documents", "files", "fingerprint")
    }
    for file in manifest["files"]:
        content = (tmp_path / file["name"]).read_bytes()
        ids = flat(splits[file["split"]][int(file["name"][-10:-4])])
        assert {key: file[key] for key in file if key != "text_bytes"} == {
            **{"name": file["name"], "split": file["split"], "tokens": len(ids)},
            **{"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()},
            **{"max_id": max(ids), "documents": ids.count(END_OF_TEXT)},
        }
    del manifest["fingerprint"]
    body = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    recorded = json.loads((tmp_path / "shards.json").read_text())["fingerprint"]
    assert recorded == hashlib.sha256(body.encode()).hexdigest()


def test_a_folder_that_must_not_be_written_to_is_used_from_another(tmp_path):
    source, out = tmp_path / "mounted", tmp_path / "deep" / "mine"
    source.mkdir()
    llmc_shards(source, made_splits())
    before = snapshot(source)
    manifest = import_folder(source, out=out)
    assert (snapshot(source), [path.name for path in out.iterdir()]) == (before, ["shards.json"])
    data = open_data(out, vocab_size=50304)
    assert (data.splits["train"][0].path, verify(out)) == (source / "fineweb_train_000001.bin", [])
    # Where the files lie is no property of the data.
    os.rename(source, tmp_path / "moved")
    with pytest.raises(DataError, match=r'mounted, which does not exist; .*correct "folder"'):
        open_data(out, vocab_size=50304)
    path = out / "shards.json"
    path.write_text(path.read_text().replace(str(source), str(tmp_path / "moved")))
    assert open_data(out, vocab_size=50304).fingerprint == data.fingerprint
    beside = import_folder(tmp_path / "moved")
    beside["dataset"] = manifest["dataset"]
    assert beside["files"] == manifest["files"]
    with pytest.raises(DataError, match="holds something else already"):
        import_folder(source.with_name("moved"), out=tmp_path)


def test_files_that_were_not_imported_say_how_and_a_new_one_is_noticed(tmp_path):
    llmc_shards(tmp_path, made_splits())
    with pytest.raises(DataError, match=r"no train shards .*data import"):
        open_data(tmp_path, vocab_size=50304)
    import_folder(tmp_path, ImportOptions(train_files=("*_train_00000?.bin",)))
    open_data(tmp_path, vocab_size=50304)  # what was left out on purpose does not matter
    new = tmp_path / "fineweb_train_000099.bin"
    write_llmc(new, documents(9, 1))
    with pytest.raises(DataError, match=r"fineweb_train_000099\.bin: not listed"):
        open_data(tmp_path, vocab_size=50304)
    assert verify(tmp_path) == [f"{new}: not listed in shards.json"]


@pytest.mark.parametrize("name", ["llm.c", "datatrove", "Megatron", "nanoGPT"])
def test_a_file_that_changed_since_is_named(tmp_path, name):
    import_folder(tmp_path, FORMATS[name][0](tmp_path, made_splits("none")))
    path = open_data(tmp_path, vocab_size=50304).splits["val"][0].path
    whole = path.read_bytes()
    flip_bit(path, -30)
    assert [line.split(": ")[0] for line in verify(tmp_path)] == [str(path)]
    shards = open_data(tmp_path, vocab_size=50304).splits["val"]
    reader = WindowReader(shards, context_length=CONTEXT, id_limit=50257, verify=True)
    reader.read(np.array([0]), np.array([0]))
    with pytest.raises(DataError, match=f"{path.name}: damaged"):
        reader.verifier.wait()
    reader.close()
    path.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=f"{path.name}: .*truncated"):
        open_data(tmp_path, vocab_size=50304)


def test_a_damaged_index_is_named_where_documents_depend_on_it(tmp_path):
    import_folder(tmp_path, token_files.datatrove_files(tmp_path, made_splits("none")))
    index = tmp_path / "0_shuffled.ds.index"
    patch(index.name, 0, b"\1")(tmp_path)
    assert verify(tmp_path) == [
        f"{tmp_path / '0_shuffled.ds'}: {index}: damaged "
        "(its sha256 is not the one in shards.json); restore the file"
    ]
    data = open_data(tmp_path, vocab_size=50304)
    with pytest.raises(DataError, match=r"0_shuffled\.ds\.index: damaged"):
        document_marks(data.splits["val"][0], None)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="reads /proc/self/io")
@pytest.mark.parametrize("name", ["llm.c", "datatrove", "nanoGPT"])
def test_every_byte_is_read_once(tmp_path, name):
    FORMATS[name][0](tmp_path, {"train": [documents(9_000, 1)] * 2, "val": [documents(4_000, 2)]})
    wanted = ImportOptions(val_files=("0_*.ds",)) if name == "datatrove" else ImportOptions()
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    GPT2.byte_lengths()  # not part of it
    before = psutil.Process().io_counters().read_chars
    import_folder(tmp_path, wanted)
    assert size <= psutil.Process().io_counters().read_chars - before < 1.15 * size + 500_000


@pytest.mark.parametrize("name", ["llm.c", "Megatron"])
def test_a_run_sees_the_same_batches_as_over_npy_shards(tmp_path, name):
    write = write_llmc if name == "llm.c" else token_files.write_megatron
    folders = {kind: tmp_path / kind for kind in ("npy", "foreign")}
    write_shards(folders["npy"], train=(1003, 777), val=(650,))
    folders["foreign"].mkdir()
    for path in folders["npy"].iterdir():
        write(folders["foreign"] / f"{path.stem}.bin", [np.load(path).tolist()])
    import_folder(folders["foreign"], token_files.GPT2)
    runs = {kind: Run(folder, tmp_path / f"runs_{kind}") for kind, folder in folders.items()}
    for run in runs.values():
        run.train("--max_steps=20")
    for field in ("batch_hash", "loss"):
        npy, foreign = ([event[field] for event in run.events("step")] for run in runs.values())
        assert (len(npy), npy) == (20, foreign)
    shown = tokens_of_step(runs["foreign"].path, 3)
    assert shown.hash == runs["npy"].events("step")[2]["batch_hash"]
    # A resume needs the same files, byte for byte.
    flip_bit(folders["foreign"] / "tiny_train_000001.bin", -2)
    (folders["foreign"] / "shards.json").unlink()
    import_folder(folders["foreign"], token_files.GPT2)
    assert "data" in str(runs["foreign"].rejected("--max_steps=20", "--resume=latest"))


def test_the_command_says_how_it_took_the_files(tmp_path):
    (folder := tmp_path / "d").mkdir()
    token_files.datatrove_files(folder, made_splits("after"))
    code, said, error = launch.call("data", "import", folder, "--val_files", "0_*.ds")
    assert (code, error.count("error")) == (0, 0)
    for words in ("12 files", "11 train, 1 val", "datatrove", "gpt2", "50256 after each document"):
        assert words in said
    out = tmp_path / "elsewhere"
    expanded = [str(path) for path in folder.glob("0_*.ds")]  # by the shell
    launch.worked(launch.call("data", "import", folder, "--out", out, "--val_files", *expanded))
    tokens = open_data(out, vocab_size=50304).tokens("val")
    assert tokens == len(flat(made_splits("after")["val"][0]))
    launch.rejected(launch.call("data", "import", folder, "--offset", "-2"))
    below = launch.call("data", "import", folder, "--end_of_text_id", "-1")
    assert "end_of_text_id -1 must be at least 0" in launch.rejected(below)


def _llmc_elsewhere(folder: Path) -> None:
    files = folder.with_name("files")
    files.mkdir()
    write_llmc(files / "x_train.bin", [list(range(300))])
    write_llmc(files / "x_val.bin", [list(range(300))])
    import_folder(files, out=folder)


def _datatrove(folder: Path) -> None:
    folder.mkdir()
    documents = [list(range(90)), list(range(90, 100)), list(range(100, 300))]
    for split in ("train", "val"):
        token_files.write_datatrove(folder / f"{split}.ds", documents, width=4, name=None)
    import_folder(folder, token_files.GPT2)


@pytest.mark.parametrize("make", [_llmc_elsewhere, _datatrove])
def test_no_edit_of_a_manifest_raises_anything_but_one_line(tmp_path, make):
    make(tmp_path / "data")
    assert_edits_are_one_line_or_open(tmp_path / "data")


TEXT = [f"{text} é 你好 🙂" for text in TEXTS]


def test_the_file_of_gpt2s_tokenizer_is_gpt2s(tmp_path):
    file = tmp_path / "gpt2.json"
    file.write_bytes(GPT2.tokenizer_json())
    FORMATS["llm.c"][0](tmp_path, made_splits("before"))
    found = import_folder(tmp_path, ImportOptions(tokenizer=str(file)))
    assert found["tokenizer"] == GPT2.record()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_files_of_another_program_take_a_named_tokenizer(tmp_path, elsewhere, monkeypatch):
    (tmp_path / "t").mkdir()
    tokenizer = train_bpe(TEXT, 300)
    for name, content in tokenizer.files.items():
        (tmp_path / "t" / name).write_bytes(content)
    folder = tmp_path / "shards"
    folder.mkdir()
    for split in ("train", "val"):
        ids = [id for text in TEXT for id in (tokenizer.end_of_text, *tokenizer.encode(text))]
        np.save(folder / f"x_{split}_000000.npy", np.array(ids, np.uint16))
    out = tmp_path / "out" if elsewhere else None
    import_folder(folder, ImportOptions(tokenizer=str(tmp_path / "t")), out)
    data = open_data(out or folder, vocab_size=384)
    assert (data.tokenizer, data.end_of_text.id) == (tokenizer, tokenizer.end_of_text)
    facts = measure(out or folder)["val"]
    assert facts.text_bytes == sum(len(text.encode()) for text in TEXT)
    assert len(facts.lengths) == len(TEXT)
    with pytest.raises(DataError, match="bytes's end at 256"):
        import_folder(folder, ImportOptions(tokenizer="bytes"), tmp_path / "other")
    with pytest.raises(ConfigError, match="--end_token <end>: needs --tokenizer with its file"):
        import_folder(folder, ImportOptions(end_token="<end>"), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    monkeypatch.setenv("FAULT", "import.after_tokenizer:enospc@0")
    said = (
        r"shards.json: cannot be written \(No space left on device\); free space and start again$"
    )
    with pytest.raises(SaveError, match=said):
        import_folder(folder, ImportOptions(tokenizer=str(tmp_path / "t")), tmp_path / "other")
