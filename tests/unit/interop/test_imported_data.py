"""Imported token files: their tokenizers, and manifests of them that somebody edited."""

from pathlib import Path

import numpy as np
import pytest

from corpora import TEXTS
from edited_manifests import assert_edits_are_one_line_or_open
from gpt2lab.data.shards import open_data
from gpt2lab.data.verify import measure
from gpt2lab.errors import ConfigError, DataError
from gpt2lab.interop.import_shards import ImportOptions, import_folder
from gpt2lab.tokenizers.bpe import train_bpe
from token_files import write_datatrove, write_llmc

TEXT = [f"{text} é 你好 🙂" for text in TEXTS]


def _llmc_elsewhere(folder: Path) -> None:
    files = folder.with_name("files")
    files.mkdir()
    for split in ("train", "val"):
        write_llmc(files / f"x_{split}.bin", [list(range(300))])
    import_folder(files, out=folder)


def _datatrove(folder: Path) -> None:
    folder.mkdir()
    documents = [list(range(90)), list(range(90, 100)), list(range(100, 300))]
    for split in ("train", "val"):
        write_datatrove(folder / f"{split}.ds", documents, width=4, name=None)
    import_folder(folder, ImportOptions(tokenizer="gpt2"))


@pytest.mark.parametrize("make", [_llmc_elsewhere, _datatrove])
def test_no_edit_of_a_manifest_raises_anything_but_one_line(tmp_path, make):
    make(tmp_path / "data")
    assert_edits_are_one_line_or_open(tmp_path / "data")


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
    assert data.tokenizer == tokenizer
    assert data.end_of_text.id == tokenizer.end_of_text
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
    with pytest.raises(DataError, match=said):
        import_folder(folder, ImportOptions(tokenizer=str(tmp_path / "t")), tmp_path / "other")
