"""The shapes of conversations: the same ids and the same mask from each, and what is rejected."""

import json
import re
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conversations import CONTEXT, Echo, write_model
from gpt2lab.config.schema import Config
from gpt2lab.config.settings import override
from gpt2lab.errors import DataError
from gpt2lab.finetuning.chat import Chat
from gpt2lab.finetuning.conversations import read_conversations
from gpt2lab.finetuning.rows import open_instructions
from gpt2lab.tokenizers.chat_template import Turn, alternating, encode
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, GPT2
from launch import REPOSITORY, ask

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)
HI = {"role": "user", "content": "Hi"}
YO = {"role": "assistant", "content": "Yo"}


def messages(texts: list[str], words: tuple[str, str, str, str]) -> list[dict[str, Any]]:
    who, what, user, assistant = words
    return [{who: assistant if n % 2 else user, what: text} for n, text in enumerate(texts)]


def shapes(texts: list[str], system: str) -> list[dict[str, Any]]:
    """Write one conversation in every shape that can hold it."""
    openai = messages(texts, ("role", "content", "user", "assistant"))
    sharegpt = messages(texts, ("from", "value", "human", "gpt"))
    parts = [
        {**one, "content": [{"type": "text", "text": some} for some in (text[:2], text[2:])]}
        for one, text in zip(openai, texts, strict=True)
    ]
    first = [{"role": "system", "content": system}] if system else []
    beside = {"system": system} if system else {}
    found = [
        {"messages": [*first, *openai]},
        {"messages": [*first, *parts]},
        {"messages": [*first, *openai], "prompt": texts[0], "prompt_id": "1"},
        {"conversations": [*({"from": "system", "value": s["content"]} for s in first), *sharegpt]},
        {"conversations": sharegpt, **beside},
        {"data": texts, "id": "1", **beside},
    ]
    if len(texts) == 2:
        question, answer = texts
        found += [
            {"instruction": question, "input": " ", "output": answer, **beside},
            {"instruction": question, "output": answer, **beside},
            {"prompt": question, "completion": answer, **beside},
        ]
    return found


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3), st.one_of(st.just(""), TEXTS))
def test_a_conversation_has_equal_ids_and_mask_in_every_shape(tmp_path_factory, exchanges, system):
    texts = [text for exchange in exchanges for text in exchange]
    path = tmp_path_factory.mktemp("shapes") / "all.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in shapes(texts, system)))
    read = [encode(one.turns, GPT2) for one in read_conversations(str(path))]
    turns = [Turn("assistant" if n % 2 else "user", t.strip()) for n, t in enumerate(texts)]
    turns = [Turn("system", system.strip()), *turns] if system else turns
    assert read == [encode(turns, GPT2)] * len(read)


def test_every_answer_of_two_turns_after_a_system_message_is_a_target_token_by_token():
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yo."), ("user", "More")]
    ids, is_answer = encode([Turn(*turn) for turn in [*turns, ("assistant", "No.")]], GPT2)
    shown = [(GPT2.decode([id]), answer) for id, answer in zip(ids, is_answer, strict=True)]
    end = "<|endoftext|>"

    def asked(*words: str) -> list[tuple[str, bool]]:
        return [(word, False) for word in words]

    frame = ("###", " Instruction", ":", "\n"), ("\n", "\n", "###", " Response", ":", "\n")
    assert shown == [
        *asked(end, "Be", " brief", ".", "\n", "\n", *frame[0], "Hi", *frame[1]),
        *(("Yo", True), (".", True), (end, True)),
        *asked(*frame[0], "More", *frame[1]),
        *(("No", True), (".", True), (end, True)),
    ]
    assert ids[0] == ids[-1] == END_OF_TEXT


LATE = {"role": "system", "content": "S"}
BAD: dict[str, dict[str, Any]] = {
    "preferences": {"prompt": "Hi", "chosen": "Yo", "rejected": "No"},
    "a tool's answer": {"messages": [HI, {"role": "tool", "content": "1"}]},
    "a call": {"messages": [HI, {**YO, "tool_calls": [{"id": "1"}]}]},
    "an observation": {"conversations": [{"from": "observation", "value": "1"}]},
    "tools": {"messages": [HI, YO], "tools": "[{}]"},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, YO]},
    "no weight": {"messages": [HI, {**YO, "weight": 0}]},
    "twice the user": {"messages": [HI, HI, YO]},
    "a late system": {"messages": [HI, YO, LATE]},
    "two systems": {"messages": [LATE, HI, YO], "system": "S"},
    "GPT first": {
        "conversations": [{"from": "gpt", "value": "Yo"}, {"from": "human", "value": "Hi"}]
    },
    "an odd list": {"data": ["Hi", "Yo", "And?"]},
    "no texts": {"data": [["Hi", "Yo"]]},
    "a history": {"instruction": "Hi", "output": "Yo", "history": [["a", "b"]]},
    "no completion": {"prompt": "Hi"},
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_learned_is_named_with_its_line(name, tmp_path, wording):
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"data": ["Hi", "Yo"]}, BAD[name]])))
    with pytest.raises(DataError, match=f"{path}:2: ", check=wording):
        read_conversations(str(path))


def test_an_array_a_table_and_a_file_of_windows_are_read_like_lines(tmp_path):
    records = [{"messages": [HI, YO]}, {"messages": [HI, {"role": "assistant", "content": "No"}]}]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "array.json").write_text("\ufeff" + json.dumps(records, indent=2))
    windows = "\ufeff" + "\r\n".join(map(json.dumps, records)) + "\r\n"
    (tmp_path / "windows.jsonl").write_bytes(windows.encode())
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "table.parquet")
    read = {path.name: read_conversations(str(path)) for path in tmp_path.iterdir()}
    turns = {name: [one.turns for one in found] for name, found in read.items()}
    assert len(turns) == 5
    assert all(found == turns["lines.jsonl"] for found in turns.values())
    for name, content, place in (
        ("bad.json", json.dumps([*records, {"messages": []}]), "bad.json record 3: the last"),
        ("cut.json", json.dumps(records)[:-9], "cut.json: not JSON"),
        ("cut.parquet", "PAR1", "cut.parquet: Parquet"),
        ("none.json", None, "none.json: No such file or directory; --instructions takes"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=re.escape(place)):
            read_conversations(str(tmp_path / name))
    pq.write_table(pa.Table.from_pylist([*records, {"messages": [HI]}]), tmp_path / "bad.parquet")
    with pytest.raises(DataError, match=r"bad\.parquet row 3: the last message"):
        read_conversations(str(tmp_path / "bad.parquet"))


def test_every_shape_of_the_docs_is_read(tmp_path):
    page = (REPOSITORY / "docs" / "finetuning.md").read_text()
    records = re.findall(r"^\| .* \| `(\{.*\})` \|$", page, flags=re.M)
    assert len(records) == 5
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(records))
    assert [len(one.turns) for one in read_conversations(str(path))] == [2, 2, 2, 4, 2]


def test_a_chat_keeps_its_system_message_in_the_template_of_training():
    echo = Echo()
    chat = Chat(echo, system="Be brief.")  # type: ignore[arg-type]
    for number in range(6):
        list(chat.ask(f"Question {number}"))
        turns = [Turn("system", "Be brief."), *chat.turns[:-1]]
        assert echo.asked[-1][0] == encode(turns, GPT2)[0]
    assert 2 <= len(chat.turns) < 12, "nothing was forgotten, or all"
    asked = Turn("user", "Question")
    assert alternating([Turn("system", ""), asked], last="user") == (asked,)


def test_a_dry_run_shows_what_the_first_conversation_trains_on(tmp_path):
    record = {"messages": [{"role": "system", "content": "S\x1b[2J"}, HI, YO, HI, YO]}
    lines = [record, {"data": ["Hi", "No"]}]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    write_model(tmp_path / "hf")
    flags = ("--init_from=hf", "--instructions=pairs.jsonl", "--dry_run", "--max_steps=1")
    shown = ask(REPOSITORY / "src" / "finetune.py", *flags, folder=tmp_path)
    assert shown.endswith(
        "example        the first conversation, trained on between >>> and <<<\n"
        "<|endoftext|>S\\x1b[2J\n\n### Instruction:\nHi\n\n### Response:\n>>>Yo<|endoftext|><<<"
        "### Instruction:\nHi\n\n### Response:\n>>>Yo<|endoftext|><<<\n"
    )
    values = {"instructions": str(tmp_path / "pairs.jsonl"), "context_length": CONTEXT}
    data = open_instructions(override(Config(), values), GPT2)
    assert sum(rows.targets() for rows in data.rows.values()) == 2 * 2 + 2
