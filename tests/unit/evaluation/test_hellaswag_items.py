"""HellaSwag's file: fetched whole or not at all, every bad line named, token ids kept and never stale."""

import hashlib
import json
import socket
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from gpt2lab.errors import DataError, SaveError
from gpt2lab.evaluation import hellaswag_items
from gpt2lab.evaluation.hellaswag_items import STYLES, fetch_hellaswag, read_items, tokenize
from gpt2lab.tokenizers.gpt2 import GPT2, gpt2_encoding
from gpt2lab.training import resolve as starts
from gpt2lab.training.resolve import resolve, with_hellaswag
from tiny import parse, pretrain, write_items

GOOD: dict[str, Any] = {"ind": 1, "activity_label": "Tea", "ctx": "A man boils water. he"}
GOOD |= {"endings": ["pours it.", "sings.", "leaves.", "sits."], "label": 0}


def without(name: str) -> bytes:
    return json.dumps({key: value for key, value in GOOD.items() if key != name}).encode()


def with_(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode()


BAD_LINES = {
    "cut": (json.dumps(GOOD).encode()[:60], "not JSON .*truncated"),
    "list": (b"[]", "not a JSON object"),
    "no context": (without("ctx"), "`ctx`"),
    "no activity": (without("activity_label"), "`activity_label`"),
    "half a context": (with_(ctx_a="a", ctx_b=7), "`ctx_b`"),
    "no endings": (without("endings"), "four `endings`"),
    "three endings": (with_(endings=["a", "b", "c"]), "four `endings`"),
    "one text as endings": (with_(endings="abcd"), "four `endings`"),
    "empty ending": (with_(endings=["a", "b", " ", "d"]), "ending 2 is empty"),
    "number as ending": (with_(endings=["a", 2, "c", "d"]), "ending 1 is empty or no text"),
    "label 4": (with_(label=4), "label '4'"),
    "label true": (with_(label=True), "label 'True'"),
    "test split": (with_(label=""), "label ''"),
    "no label": (without("label"), "label ''"),
    "latin-1": ('{"ctx": "café"}'.encode("latin-1"), "not UTF-8"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named(kind, tmp_path):
    line, problem = BAD_LINES[kind]
    path = tmp_path / "items.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(DataError, match=f"items.jsonl line 3: .*{problem}"):
        read_items(path)


def test_labels_may_be_text_and_line_separators_may_stand_in_texts(tmp_path):
    path = tmp_path / "items.jsonl"
    with pytest.raises(DataError, match=r"items.jsonl: .*No such file"):
        read_items(path)
    path.write_bytes(b"\n\n")
    with pytest.raises(DataError, match=r"items.jsonl: no HellaSwag items"):
        read_items(path)
    row = json.dumps(GOOD | {"label": "2", "ctx": "one\u2028two"}, ensure_ascii=False)
    path.write_text(row + "\n", encoding="utf-8")
    (item,) = read_items(path)
    assert (item.label, item.context) == (2, "one\u2028two")


def test_the_two_texts_of_an_item():
    """Written out by hand: brackets, titles, capitals, and the space that a removed bracket leaves."""
    endings = ("[step] Stir [it] well.", "a", "b  c", "d [title] e")
    item = hellaswag_items.Item("X. then [x]", ("X.", "then [x]"), "Tea", endings, 0)
    (harness, chars), (tutorial, _) = (tokenize(item, style, GPT2) for style in STYLES)
    decoded = [gpt2_encoding().decode(ids.tolist()) for ids in harness]
    assert decoded[0] == "Tea: X. Then"
    # The harness moves the space at the context's end to the ending, and counts the ending without either.
    assert (decoded[1:], chars) == (["   Stir well.", "  a", "  b c", "  d. e"], [11, 1, 3, 4])
    decoded = [gpt2_encoding().decode(ids.tolist()) for ids in tutorial]
    assert decoded == ["X. then [x]", *(f" {text}" for text in endings)]


def test_a_download_is_kept_only_whole(tmp_path):
    source = write_items(tmp_path / "source.jsonl")
    content = source.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    target = tmp_path / "data" / "hellaswag" / "val.jsonl"
    for bad in (content[:-10], content.replace(b"box", b"fox"), b""):
        source.write_bytes(bad)
        with pytest.raises(DataError, match=r"truncated or altered, not kept; download it"):
            fetch_hellaswag(target, url=source.as_uri(), sha256=sha256)
        assert not target.parent.exists()
    source.write_bytes(content)
    assert fetch_hellaswag(target, url=source.as_uri(), sha256=sha256) == target
    assert {one.name: one.read_bytes() for one in target.parent.iterdir()} == {target.name: content}
    source.unlink()  # not asked for again
    assert fetch_hellaswag(target, url=source.as_uri(), sha256=sha256) == target
    target.write_bytes(content[:-10])
    with pytest.raises(DataError, match=r"truncated or altered, delete it; download it"):
        fetch_hellaswag(target, url=source.as_uri(), sha256=sha256)


def test_a_source_that_is_not_there_or_silent_does_not_hold_up_a_start(tmp_path):
    with pytest.raises(DataError, match="cannot be downloaded"):
        fetch_hellaswag(tmp_path / "x.jsonl", url=(tmp_path / "gone").as_uri())
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and says nothing
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x"
        with pytest.raises(DataError, match=r"no answer in time|timed out"):
            fetch_hellaswag(tmp_path / "x.jsonl", url=url, connect_seconds=0.3)
        server.accept()[0].close()
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # it was asked once
            server.accept()


def test_a_source_that_breaks_off_is_rejected(tmp_path):
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x"
        with pytest.raises(DataError, match=r"truncated or altered|cannot be downloaded"):
            fetch_hellaswag(tmp_path / "x.jsonl", url=url)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def flags(tiny_flags) -> list[str]:
    return [flag for flag in tiny_flags if not flag.startswith("--vocab_size")]


def started(flags: list[str]) -> starts.Start:
    return with_hellaswag(resolve(parse(flags), world_size=1, set_aside=False))


def test_nobody_asks_nothing_is_fetched(flags, tiny_flags, monkeypatch):
    monkeypatch.setattr(starts, "fetch_hellaswag", Mock(side_effect=AssertionError))
    assert started(flags).hellaswag == "off"
    small = started([*tiny_flags, "--hellaswag_freq=5"])  # 256 ids: no such text
    assert (small.hellaswag, "no HellaSwag" in " ".join(small.warnings)) == ("off", True)
    planned = resolve(parse([*flags, "--hellaswag_freq=5"]), world_size=1, set_aside=False)
    assert planned.hellaswag == "fetch", "a plan alone fetches nothing"


def test_offline_is_one_line_and_what_was_fetched_is_kept_in_the_settings(
    flags, tmp_path, monkeypatch
):
    """So that a resume evaluates too, though nothing is typed there."""
    for problem in (DataError("no network"), SaveError("no space")):
        monkeypatch.setattr(starts, "fetch_hellaswag", Mock(side_effect=problem))
        start = started([*flags, "--hellaswag_limit=10"])
        lines = [warning for warning in start.warnings if "HellaSwag" in warning]
        assert (start.hellaswag, lines) == ("off", [f"HellaSwag is not evaluated: {problem}"])
    path = write_items(tmp_path / "items.jsonl")
    monkeypatch.setattr(starts, "fetch_hellaswag", lambda: path)
    start = started([*flags, "--hellaswag_freq=5"])
    assert (start.hellaswag, start.config.eval.hellaswag_path) == ("on", path)


def test_a_resume_whose_file_is_gone_can_go_on_without(flags, tmp_path, monkeypatch):
    path = write_items(tmp_path / "items.jsonl")
    flags = [*flags, "--max_steps=2", "--stop_after_steps=1", "--sample_tokens=1"]
    pretrain(parse([*flags, f"--hellaswag_path={path}", "--hellaswag_freq=2"]))
    path.unlink()
    monkeypatch.setattr(starts, "fetch_hellaswag", pytest.fail)
    resume = ["--resume=latest", "--run_name=tiny", f"--checkpoint_dir={tmp_path / 'runs'}"]
    with pytest.raises(DataError, match=r"items.jsonl: .* \(None: no HellaSwag\)"):
        started(resume)
    assert started([*resume, "--hellaswag_path=None"]).hellaswag == "off"


def test_a_bad_file_is_rejected_before_anything_is_written(flags, tmp_path):
    path = tmp_path / "items.jsonl"
    path.write_text("{}\n")
    with pytest.raises(DataError, match=r"items.jsonl line 1"):
        started([*flags, f"--hellaswag_path={path}"])
    assert not (tmp_path / "runs").exists()
