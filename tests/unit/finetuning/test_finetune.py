"""Fine-tuning: what a sample is, and what counts as a target."""

import json
import random
import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from conversations import CONTEXT, finetune, flags_of, order_of, rows_of, write_both
from gpt2lab.config.derived import BatchPlan
from gpt2lab.config.schema import ActivationCheckpointing, Config, TuningConfig
from gpt2lab.config.settings import override
from gpt2lab.distributed.strategy import apply_activation_checkpointing
from gpt2lab.errors import DataError
from gpt2lab.finetuning import conversations
from gpt2lab.finetuning.conversations import read_conversations
from gpt2lab.finetuning.packed import PackedGPT, RowLoader, hidden_of_rows
from gpt2lab.finetuning.rows import NO_OWNER, Rows, choose_held_out, open_instructions
from gpt2lab.model.gpt import GPT, Block
from gpt2lab.model.lora import add_lora, init_adapters
from gpt2lab.model.loss import token_losses
from gpt2lab.runs.target import find_target
from gpt2lab.runs.weights import load_weights
from gpt2lab.tokenizers import chat_template
from gpt2lab.tokenizers.chat_template import Turn
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, GPT2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a model and pairs; treat as read-only."""
    return write_both(tmp_path_factory.mktemp("finetune"))


@pytest.fixture(scope="module")
def model(folder) -> GPT:
    return load_weights(find_target(str(folder / "hf"), folder))


def loss_and_gradient(model: GPT, rows: Rows, pieces: int = 1) -> tuple[float, torch.Tensor]:
    """Return the mean loss over all targets and its gradient, with the rows cut into micro-batches."""
    ids = torch.from_numpy(rows.ids.astype(np.int64))
    targets = torch.where(torch.from_numpy(rows.owner) == NO_OWNER, -1, ids)[:, 1:]
    total = 0.0
    model.zero_grad()
    for x, y in zip(ids[:, :-1].chunk(pieces), targets.chunk(pieces), strict=True):
        loss = PackedGPT(model, END_OF_TEXT)(x, y) / rows.targets()
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def test_rows_hold_every_conversation_once_and_packed_ones_are_fewer(folder):
    packed, padded = rows_of(folder, "on"), rows_of(folder, "off")
    for split in ("train", "val"):
        texts = []
        for rows in (packed[split], padded[split]):
            found = [rows.ids[rows.owner == n].tolist() for n in range(rows.owner.max() + 1)]
            assert all(END_OF_TEXT in answer for answer in found)
            texts.append(found)
        assert texts[0] == texts[1]
    assert len(packed["train"]) < len(padded["train"]) / 2
    assert len(padded["train"]) + len(padded["val"]) == 24
    # The first id of a conversation, and all padding, is never a target: the input cannot explain it.
    rows = packed["train"]
    after_end = (rows.ids[:, 1:] == END_OF_TEXT) & (rows.ids[:, :-1] == END_OF_TEXT)
    assert after_end.any()
    assert (rows.owner[:, 1:][after_end] == NO_OWNER).all()
    assert (rows.owner[:, 0] == NO_OWNER).all()


def test_packed_conversations_do_not_see_each_other(folder, model):
    """Each token's loss in a packed row is that of its conversation in a row of its own, and only so."""
    packed, padded = rows_of(folder, "on")["train"], rows_of(folder, "off")["train"]

    def losses(rows: Rows, *, apart: bool) -> dict[int, torch.Tensor]:
        ids = torch.from_numpy(rows.ids.astype(np.int64))
        with torch.no_grad():
            own = hidden_of_rows(model, ids[:, :-1], END_OF_TEXT)
            hidden = own if apart else model.hidden(ids[:, :-1])
            each = token_losses(model.head(hidden), ids[:, 1:])
        owner = torch.from_numpy(rows.owner[:, 1:])
        return {n: each[owner == n] for n in range(int(owner.max()) + 1)}

    alone, together = losses(padded, apart=False), losses(packed, apart=True)
    for number, expected in alone.items():
        torch.testing.assert_close(together[number], expected, rtol=1e-5, atol=1e-5)
    seen = losses(packed, apart=False)
    assert any((seen[n] - alone[n]).abs().max() > 1e-3 for n in alone), "the test sees nothing"


def test_packing_and_micro_batches_change_nothing_but_the_order_of_sums(folder, model):
    packed, padded = rows_of(folder, "on")["train"], rows_of(folder, "off")["train"]
    loss, gradient = loss_and_gradient(model, padded)
    for rows, pieces in ((packed, 1), (packed, len(packed)), (padded, 7)):
        other, other_gradient = loss_and_gradient(model, rows, pieces)
        assert other == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("lora_r", [0, 2])
def test_recomputing_activations_changes_no_bit(lora_r, folder, monkeypatch):
    """With adapters the first block has no input that needs a gradient, and is computed again all the same."""
    calls, forward = 0, Block.forward

    def counted(block: Block, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(block, *args)

    monkeypatch.setattr(Block, "forward", counted)
    rows, found = rows_of(folder, "on")["train"], []
    for mode in get_args(ActivationCheckpointing):
        model = load_weights(find_target(str(folder / "hf"), folder))
        if lora_r:
            add_lora(model, TuningConfig(lora_r=lora_r))
            init_adapters(model, seed=1)
        apply_activation_checkpointing(model, mode)
        calls = 0
        found.append(loss_and_gradient(model, rows))
        assert calls == (1 if mode == "none" else 2)
    for loss, gradient in found[1:]:
        assert loss == found[0][0]
        assert torch.equal(gradient, found[0][1])


@pytest.mark.parametrize("packing", ["on", "off"])
def test_an_epoch_trains_every_answer_once_on_any_number_of_processes(folder, packing):
    rows = rows_of(folder, packing)["train"]
    even = len(rows) // 2 * 2
    rows = Rows(rows.ids[:even], rows.owner[:even], rows.tokenizer)
    order = order_of(rows)
    seen = {}
    for world in (1, 2):
        plan = BatchPlan(2, 1, 2 // world, world, CONTEXT)
        found, count = [], 0
        for first in range(0, len(rows), 2):
            how = {"device": torch.device("cpu")}
            loaders = [RowLoader(order, rows, plan, rank=rank, **how) for rank in range(world)]
            ranks = [loader.fetch(first) for loader in loaders]
            assert len({batch.num_targets for batch in ranks}) == 1
            count += ranks[0].num_targets
            micros = [micro for batch in ranks for micro in batch.micro_batches]
            assert [micro.index for micro in micros] == [0, 1]
            found += [micro.targets[micro.targets >= 0].tolist() for micro in micros]
        assert count == rows.targets() == sum(map(len, found))
        seen[world] = found
    assert seen[1] == seen[2]
    pairs = zip(rows.ids, rows.owner, strict=True)
    assert sorted(seen[1]) == sorted(ids[owner != NO_OWNER].tolist() for ids, owner in pairs)
    assert order.epoch_of(len(rows)) == 1


def test_what_is_held_out_depends_on_texts_alone_and_the_demo_is_usable():
    digests = [f"{n:03d}" for n in range(50)]
    chosen = choose_held_out(digests, 0.1)
    shuffled = random.Random(0).sample(digests, 50)
    assert (len(chosen), choose_held_out([*shuffled, *shuffled], 0.1)) == (5, chosen)
    assert len(choose_held_out(digests[:3], 0.01)) == 1
    conversations = read_conversations("demo")
    assert len(conversations) >= 60
    assert len({one.turns for one in conversations}) == len(conversations)
    settings = {"instructions": "demo", "context_length": 128}
    assert not open_instructions(override(Config(), settings), GPT2).warnings


def test_held_out_conversations_that_begin_with_a_learned_one_are_counted(tmp_path):
    short = [
        [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{n}!"}]
        for n in range(20)
    ]
    more = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    path = tmp_path / "talks.jsonl"

    def warnings(talks: list[list[dict[str, str]]]) -> tuple[str, ...]:
        path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
        changes = {"instructions": str(path), "context_length": 128, "val_fraction": 0.5}
        return open_instructions(override(Config(), changes), GPT2).warnings

    (warning,) = warnings([*short, *(talk + more for talk in short)])
    assert re.fullmatch(r"\d+ held-out conversations begin with one of the training split", warning)
    assert not warnings(short)


def test_equal_records_from_the_hub_are_read_like_a_file(folder, monkeypatch):
    import datasets

    lines = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    columns = ("instruction", "output", "messages")  # a data set has every column in every row
    rows = [{name: line.get(name) for name in columns} for line in lines]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: {"org/set": rows}[name])
    hub, file = (read_conversations(s) for s in ("hf:org/set", str(folder / "pairs.jsonl")))
    assert [one.turns for one in hub] == [one.turns for one in file]
    unreachable = "the Hugging Face Hub cannot be reached"
    for is_offline, why in ((False, "cannot be read"), (True, unreachable)):
        monkeypatch.setattr(conversations, "is_offline", lambda answer=is_offline: answer)
        with pytest.raises(DataError, match=f"hf:org/none: {why}"):
            read_conversations("hf:org/none")


GOOD = json.dumps({"instruction": "Hi", "output": "Hello"})
LINES = {
    "no JSON": "{'a': 1}",
    "not UTF-8": "\udcff",
    "a list": "[1, 2]",
    "other keys": '{"question": "Hi", "answer": "Yo"}',
    "a number": '{"instruction": 7, "output": "Yo"}',
    "no content": '{"messages": [{"role": "user"}]}',
    "no list": '{"messages": "Hi"}',
    "wrong role": '{"messages": [{"role": "human", "content": "Hi"}]}',
    "unanswered": '{"messages": [{"role": "user", "content": "Hi"}]}',
}


@pytest.mark.parametrize("name", LINES)
def test_a_broken_line_is_named_with_its_place(name, folder, tmp_path, wording):
    path = tmp_path / "pairs.jsonl"
    content = "\n".join([GOOD, "", LINES[name], LINES[name], GOOD])
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=f"^{path}:3: .*1 more", check=wording):
        finetune([*flags_of(folder, tmp_path / "runs", "r"), f"--instructions={path}"])
    assert not (tmp_path / "runs").exists()


def test_empty_and_long_ones_are_left_out_counted_and_named(tmp_path):
    path = tmp_path / "pairs.jsonl"
    lines = [
        *({"instruction": f"Say {n}", "output": f"{n}"} for n in range(4)),
        {"instruction": "Say nothing", "output": " \n"},
        {"instruction": "Say much", "output": "much " * CONTEXT},
        {"instruction": "Say more", "output": "more " * CONTEXT},
    ]
    said = [Turn("user", "Say all"), Turn("assistant", "all")]
    room = CONTEXT + 1 - len(chat_template.encode(said, GPT2)[0])
    lines.insert(0, {"instruction": "Say all", "output": "all" + " all" * room})
    path.write_text("\n".join(map(json.dumps, lines)))
    settings = {"instructions": str(path), "context_length": CONTEXT}
    data = open_instructions(override(Config(), settings), GPT2)
    assert data.conversations == {"train": 4, "val": 1}
    empty, long = data.warnings
    assert empty == f"1 conversations with an empty answer left out, first {path}:6"
    assert long.startswith("2 of 8 conversations are longer than the context of 64 tokens")
    assert re.search(rf"first {path}:7 has \d+$", long)
    path.write_text("\n".join(map(json.dumps, lines[5:])))
    with pytest.raises(
        DataError, match=r"of 0 usable conversations \(0 different\) none is left for train"
    ):
        open_instructions(override(Config(), settings), GPT2)
    path.write_text("\n\n")
    with pytest.raises(DataError, match=r"holds no conversations; a line holds \"messages\""):
        open_instructions(override(Config(), settings), GPT2)
