"""Files that were damaged, moved or never meant for us: each is refused by name or passed over, none is a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import launch
from conftest import CONTEXT, VOCAB, write_shards
from gpt2lab import catalog
from gpt2lab.data.shards import open_data
from gpt2lab.data.windows import WindowReader
from gpt2lab.errors import DataError, GPT2LabError
from gpt2lab.flags import parse
from gpt2lab.history import read_events
from gpt2lab.pretrain import pretrain
from gpt2lab.start import decide
from test_bad_input import FLAGS
from test_data import TEXTS, expected_stream, loader_over, run_prepare, stream_of, write_jsonl


@pytest.mark.parametrize("shard_tokens", [7, 50, 333])
def test_shards_are_filled_across_documents(tmp_path: Path, shard_tokens: int) -> None:
    """All but the last hold shard_tokens; the last takes a remainder along that could hold no window."""
    source = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    run_prepare(source, tmp_path / "out", shard_tokens=shard_tokens, val_tokens=100)
    assert stream_of(tmp_path / "out") == expected_stream(TEXTS)
    data = open_data(tmp_path / "out", vocab_size=50304)
    for split in ("train", "val"):
        sizes = [shard.tokens for shard in data.splits[split]]
        assert set(sizes[:-1]) <= {shard_tokens}
        assert 0 < sizes[-1] < 2 * shard_tokens
        assert len(sizes) == 1 or sizes[-1] >= shard_tokens


@pytest.mark.parametrize("text", ["hello world", "a", "word " * 24])
def test_a_tiny_corpus_gives_two_usable_splits_or_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.txt").write_text(text)
    if text == "word " * 24:
        run_prepare(tmp_path / "c.txt", tmp_path / "out")
        data = open_data(tmp_path / "out", vocab_size=50304)
        assert min(data.tokens("train"), data.tokens("val")) >= 2
    else:
        with pytest.raises(DataError, match="too little text"):
            run_prepare(tmp_path / "c.txt", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_other_text_under_the_same_name_is_not_taken_for_prepared(tmp_path: Path) -> None:
    for folder, texts in (("a", TEXTS), ("b", ["something else"] * 90)):
        write_jsonl(tmp_path / folder / "corpus.jsonl", texts)
    run_prepare(tmp_path / "a" / "corpus.jsonl", tmp_path / "out")
    assert run_prepare(tmp_path / "a" / "corpus.jsonl", tmp_path / "out") is None
    with pytest.raises(DataError, match="something else"):
        run_prepare(tmp_path / "b" / "corpus.jsonl", tmp_path / "out")


def test_another_column_is_another_request(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"text": t, "other": t[::-1]}) + "\n" for t in TEXTS))
    run_prepare(path, tmp_path / "out")
    with pytest.raises(DataError, match="something else"):
        run_prepare(path, tmp_path / "out", text_column="other")


@pytest.mark.parametrize("trouble", ["dangling link", "deep json", "out below a file"])
def test_an_odd_source_is_refused(tmp_path: Path, trouble: str) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a.txt").write_text("word " * 500)
    out = tmp_path / "out"
    if trouble == "dangling link":
        (tmp_path / "s" / "b.txt").symlink_to("nowhere")
    if trouble == "deep json":
        (tmp_path / "s" / "b.jsonl").write_text("[" * 100_000 + "\n")
    if trouble == "out below a file":
        (tmp_path / "f").write_text("")
        out = tmp_path / "f" / "out"
    with pytest.raises(DataError):
        run_prepare(tmp_path / "s", out)
    assert not list(tmp_path.glob(".tmp-*"))


def test_what_a_killed_preparation_left_is_swept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 500)
    (tmp_path / ".tmp-out-999999999").mkdir()
    run_prepare(tmp_path / "a.txt", tmp_path / "out")
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("damage", ["file cut", "file gone"])
def test_a_shard_lost_after_opening_is_named(tmp_path: Path, damage: str) -> None:
    folder = write_shards(tmp_path / "d", train=(2000,), val=(300,))
    data = open_data(folder, vocab_size=VOCAB)
    path = data.splits["train"][0].path
    if damage == "file cut":
        os.truncate(path, 1000)
    else:
        path.unlink()
    batches = loader_over(data).batches(0)
    with pytest.raises(DataError, match=path.name):
        for _ in range(20):
            next(batches)


def test_the_prefetching_thread_ends_even_if_its_last_read_failed(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "d", train=(2000,), val=(300,))
    data = open_data(folder, vocab_size=VOCAB)
    shard = data.splits["train"][0]
    tokens = np.load(shard.path)
    tokens[2 * 8 * CONTEXT + 20] = 999  # in the third batch
    np.save(shard.path, tokens)
    before = set(threading.enumerate())
    batches = loader_over(data).batches(0)
    next(batches)
    time.sleep(0.3)
    (thread,) = set(threading.enumerate()) - before
    batches.close()
    thread.join(3)
    assert not thread.is_alive()


@pytest.mark.parametrize("byte", range(10, 70))
def test_a_damaged_shard_header_is_refused_or_read_as_before(tmp_path: Path, byte: int) -> None:
    folder = write_shards(tmp_path / "d", train=(200,), val=(200,))
    path = folder / "tiny_train_000000.npy"
    whole = path.read_bytes()
    for value in b"\n(0b\\\xd7":
        raw = bytearray(whole)
        raw[byte] = value
        path.write_bytes(raw)
        try:
            data = open_data(folder, vocab_size=VOCAB)
        except DataError as error:
            assert path.name in str(error)
        else:
            assert data.splits["train"][0].tokens == 200


@pytest.mark.parametrize("name", ["a/b", "/tmp/abs_run", "", ".."])
def test_run_name_must_be_a_plain_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_shards(tmp_path / "data", train=(400, 300), val=(150,))
    monkeypatch.chdir(tmp_path)
    argv = [flag for flag in FLAGS if not flag.startswith("--run_name")]
    with pytest.raises(GPT2LabError, match="plain folder name"):
        decide(parse([*argv, f"--run_name={name}"]), world_size=1, set_aside=False)


@pytest.mark.parametrize(
    "argv",
    [
        ["--json"],
        ["--allow_change=max_lr"],
        ["--resume=auto", "--allow_change=bogus"],
        ["--resume=\u00b2"],  # a digit to str.isdigit, but not to int
    ],
)
def test_a_verb_without_effect_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    write_shards(tmp_path / "data", train=(400, 300), val=(150,))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GPT2LabError):
        decide(parse([*FLAGS, *argv]), world_size=1, set_aside=False)


@pytest.mark.parametrize("line", ["5", "{}", "[]", "[" * 100_000])
def test_a_metrics_line_that_is_no_event_is_named(tmp_path: Path, line: str) -> None:
    good = '{"event": "step", "time": 1.0, "attempt": 1, "step": 1}'
    (tmp_path / "metrics.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(GPT2LabError, match="line 2"):
        read_events(tmp_path)


@pytest.mark.parametrize("kind", ["binary", "folder"])
def test_an_odd_label_is_passed_over(tmp_path: Path, kind: str) -> None:
    (tmp_path / "labels").mkdir()
    if kind == "binary":
        (tmp_path / "labels" / "best").write_bytes(b"\xff\xfe")
    else:
        (tmp_path / "labels" / "best").mkdir()
    assert catalog.list_checkpoints(tmp_path) == ([], [])


def test_a_shard_with_other_content_of_the_same_size_is_named(tmp_path: Path) -> None:
    """Its header, size and ids are fine, and so is the manifest: only its hash tells."""
    write_jsonl(tmp_path / "corpus.jsonl", TEXTS * 20)
    run_prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    data = open_data(tmp_path / "out", vocab_size=50304)
    path = data.splits["train"][0].path
    np.save(path, np.full(data.splits["train"][0].tokens, 11, dtype=np.uint16))
    data = open_data(tmp_path / "out", vocab_size=50304)
    reader = WindowReader(data.splits["train"], context_length=CONTEXT, id_limit=50257, verify=True)
    with pytest.raises(DataError, match=f"{path.name}.*sha256"):
        reader.read(np.array([0]), np.array([0]))


def test_a_run_over_such_a_shard_stops_with_its_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", TEXTS * 20)
    run_prepare(tmp_path / "corpus.jsonl", tmp_path / "out")
    [path] = (tmp_path / "out").glob("*_train_*.npy")
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    flags = [
        f for f in FLAGS if not f.startswith(("--data_dir", "--checkpoint_dir", "--vocab_size"))
    ]
    flags += [f"--data_dir={tmp_path / 'out'}", f"--checkpoint_dir={tmp_path / 'runs'}"]
    with pytest.raises(DataError, match=path.name):
        pretrain(parse(flags))


def test_data_go_where_a_link_points(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 500)
    (tmp_path / "big disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "big disk")
    run_prepare(tmp_path / "a.txt", tmp_path / "out")
    assert (tmp_path / "big disk" / "shards.json").is_file()
    assert (tmp_path / "out").is_symlink()


def test_a_closed_console_does_not_end_a_run(tmp_path: Path, tiny_data: Path) -> None:
    """`python src/train.py ... | head` once ended training and reported success."""
    flags = [f for f in FLAGS if not f.startswith(("--data_dir", "--checkpoint_dir"))]
    flags += [f"--data_dir={tiny_data}", f"--checkpoint_dir={tmp_path}", "--log_freq=1"]
    command = launch.command_for(launch.TRAIN, flags, world=1)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=launch.environment()) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 0
    assert [event["step"] for event in launch.events(tmp_path / "r", "done")] == [20]
    assert "step 20/20" in (tmp_path / "r" / "log.txt").read_text()


def test_another_batch_needs_the_length_in_steps(tmp_path: Path, tiny_data: Path) -> None:
    """An epoch of another batch has another number of steps, and the ones done count for more or less."""
    flags = [
        f for f in FLAGS if not f.startswith(("--data_dir", "--checkpoint_dir", "--max_steps"))
    ]
    flags += [f"--data_dir={tiny_data}", f"--checkpoint_dir={tmp_path}", "--num_epochs=1"]
    pretrain(parse([*flags, "--stop_after_steps=10"]))
    more = [*flags, "--resume=latest", "--total_batch_size=384"]
    with pytest.raises(GPT2LabError, match="--max_steps N"):
        pretrain(parse([*more, "--allow_change=total_batch_size"]))
    more = [flag for flag in more if not flag.startswith("--num_epochs")]
    pretrain(parse([*more, "--max_steps=12", "--allow_change=total_batch_size,max_steps"]))
    steps = launch.steps(tmp_path / "r")
    assert [steps[step]["tokens"] for step in (10, 11, 12)] == [1280, 1664, 2048]
