"""Fine-tuning: what a sample is, what counts as a target, and that all else is as in pretraining."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import launch
from conversations import CONTEXT, finetune, flags_of, write_model, write_pairs
from gpt2lab.checkpoints.weights import load_weights
from gpt2lab.config import Config, Recipe, Recompute, TuningConfig
from gpt2lab.data.ledger import describe as describe_tokens
from gpt2lab.data.ledger import tokens_of_step
from gpt2lab.data.tokenizer import END_OF_TEXT, NUM_TOKENS, gpt2_encoding
from gpt2lab.errors import ConfigError, DataError, GPT2LabError
from gpt2lab.evaluation.target import find_target
from gpt2lab.finetuning.beginning import begin_tuning
from gpt2lab.finetuning.conversations import Turn, read_conversations
from gpt2lab.finetuning.loader import RowLoader, order_of
from gpt2lab.finetuning.lora import add_lora, init_adapters
from gpt2lab.finetuning.packed import PackedGPT, hidden_of_rows
from gpt2lab.finetuning.recipe import FINETUNING
from gpt2lab.finetuning.rows import NOBODY, Rows, choose_held_out, open_instructions
from gpt2lab.finetuning.template import encode
from gpt2lab.flags import parse
from gpt2lab.loss import token_losses
from gpt2lab.model import GPT, Block
from gpt2lab.plan import BatchPlan
from gpt2lab.presets import preset
from gpt2lab.pretrain import pretrain
from gpt2lab.recompute import recompute_activations
from gpt2lab.reliability.preflight import preflight
from gpt2lab.runs.report import render
from gpt2lab.runs.resume_command import plan_continuation, write
from gpt2lab.settings import override, to_flat

FINETUNE = launch.REPOSITORY / "src" / "finetune.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, pairs, and the finished run `whole`; treat as read-only."""
    folder = tmp_path_factory.mktemp("finetune")
    write_model(folder / "hf")
    write_pairs(folder / "pairs.jsonl")
    finetune(flags_of(folder, folder / "runs", "whole"))
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> GPT:
    return load_weights(find_target(str(folder / "hf"), folder))


def rows_of(folder: Path, packing: str, **more: object) -> dict[str, Rows]:
    settings = {"instructions": str(folder / "pairs.jsonl"), "packing": packing, **more}
    return open_instructions(override(Config(), {"context_length": CONTEXT, **settings})).rows


def loss_and_gradient(model: GPT, rows: Rows, pieces: int = 1) -> tuple[float, torch.Tensor]:
    """Return the mean loss over all targets and its gradient, with the rows cut into micro-batches."""
    ids = torch.from_numpy(rows.ids.astype(np.int64))
    targets = torch.where(torch.from_numpy(rows.owner) == NOBODY, -1, ids)[:, 1:]
    total = 0.0
    model.zero_grad()
    for x, y in zip(ids[:, :-1].chunk(pieces), targets.chunk(pieces), strict=True):
        loss = PackedGPT(model)(x, y) / rows.targets()
        loss.backward()
        total += loss.item()
    return total, torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


# -- template and rows -----------------------------------------------------------------------------------------------


def test_only_answers_and_their_ends_are_targets() -> None:
    turns = [Turn("system", "Be brief."), Turn("user", "Hi"), Turn("assistant", "Yo <|endoftext|>")]
    ids, is_answer = encode([*turns, Turn("user", "More"), Turn("assistant", "No")])
    text = gpt2_encoding().decode(ids)
    assert text == (
        "<|endoftext|>Be brief.\n\n### Instruction:\nHi\n\n### Response:\nYo <|endoftext|><|endoftext|>"
        "### Instruction:\nMore\n\n### Response:\nNo<|endoftext|>"
    )
    answers = gpt2_encoding().decode([i for i, a in zip(ids, is_answer, strict=True) if a])
    assert answers == "Yo <|endoftext|><|endoftext|>No<|endoftext|>"
    assert ids.count(END_OF_TEXT) == 3  # what a text says of <|endoftext|> is text


def test_rows_hold_every_conversation_once_and_packed_ones_are_fewer(folder: Path) -> None:
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


def test_a_row_never_starts_a_target_that_its_input_cannot_explain(folder: Path) -> None:
    """The first id of a conversation, and all padding, is never a target."""
    rows = rows_of(folder, "on")["train"]
    after_end = (rows.ids[:, 1:] == END_OF_TEXT) & (rows.ids[:, :-1] == END_OF_TEXT)
    assert after_end.any()
    assert (rows.owner[:, 1:][after_end] == NOBODY).all()
    assert (rows.owner[:, 0] == NOBODY).all()


def test_packed_conversations_do_not_see_each_other(folder: Path, model: GPT) -> None:
    """Each token's loss in a packed row is that of its conversation in a row of its own, and only so."""
    packed, padded = rows_of(folder, "on")["train"], rows_of(folder, "off")["train"]

    def losses(rows: Rows, *, apart: bool) -> dict[int, torch.Tensor]:
        ids = torch.from_numpy(rows.ids.astype(np.int64))
        with torch.no_grad():
            hidden = hidden_of_rows(model, ids[:, :-1]) if apart else model.hidden(ids[:, :-1])
            each = token_losses(model.head(hidden), ids[:, 1:])
        owner = torch.from_numpy(rows.owner[:, 1:])
        return {n: each[owner == n] for n in range(int(owner.max()) + 1)}

    alone, together = losses(padded, apart=False), losses(packed, apart=True)
    for number, expected in alone.items():
        torch.testing.assert_close(together[number], expected, rtol=1e-5, atol=1e-5)
    seen = losses(packed, apart=False)
    assert any((seen[n] - alone[n]).abs().max() > 1e-3 for n in alone), "the test sees nothing"


def test_packing_and_micro_batches_change_nothing_but_the_order_of_sums(
    folder: Path, model: GPT
) -> None:
    packed, padded = rows_of(folder, "on")["train"], rows_of(folder, "off")["train"]
    loss, gradient = loss_and_gradient(model, padded)
    for rows, pieces in ((packed, 1), (packed, len(packed)), (padded, 7)):
        other, other_gradient = loss_and_gradient(model, rows, pieces)
        assert other == pytest.approx(loss, rel=1e-6)
        torch.testing.assert_close(other_gradient, gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("lora_r", [0, 2])
def test_recomputing_activations_changes_no_bit(
    lora_r: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters the first block has no input that needs a gradient, and is computed again all the same."""
    calls, forward = 0, Block.forward

    def counted(block: Block, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(block, *args)

    monkeypatch.setattr(Block, "forward", counted)
    rows, found = rows_of(folder, "on")["train"], []
    modes: tuple[Recompute, ...] = ("none", "block", "selective")
    for mode in modes:
        model = load_weights(find_target(str(folder / "hf"), folder))
        if lora_r:
            add_lora(model, TuningConfig(lora_r=lora_r))
            init_adapters(model, seed=1)
        recompute_activations(model, mode)
        calls = 0
        found.append(loss_and_gradient(model, rows))
        assert calls == (1 if mode == "none" else 2)
    for loss, gradient in found[1:]:
        assert loss == found[0][0]
        assert torch.equal(gradient, found[0][1])


@pytest.mark.parametrize("packing", ["on", "off"])
def test_an_epoch_trains_every_answer_once_on_any_number_of_processes(
    folder: Path, packing: str
) -> None:
    rows = rows_of(folder, packing)["train"]
    order = order_of(rows, shuffle="windows", seed=1)
    rows = Rows(rows.ids[: len(rows) // 2 * 2], rows.owner[: len(rows) // 2 * 2])
    order = order_of(rows, shuffle="windows", seed=1)
    seen = {}
    for world in (1, 2):
        plan = BatchPlan(2, 1, 2 // world, world, CONTEXT)
        found, count = [], 0
        for first in range(0, len(rows), 2):
            ranks = [
                RowLoader(order, rows, plan, rank=rank, device=torch.device("cpu")).fetch(first)
                for rank in range(world)
            ]
            assert len({batch.num_targets for batch in ranks}) == 1
            count += ranks[0].num_targets
            micros = [micro for batch in ranks for micro in batch.micro_batches]
            assert [micro.index for micro in micros] == [0, 1]
            found += [micro.targets[micro.targets >= 0].tolist() for micro in micros]
        assert count == rows.targets() == sum(map(len, found))
        seen[world] = found
    assert seen[1] == seen[2]
    assert sorted(map(str, seen[1])) == sorted(
        str(ids[owner != NOBODY].tolist()) for ids, owner in zip(rows.ids, rows.owner, strict=True)
    )
    assert order.epoch_of(len(rows)) == 1


def test_what_is_held_out_depends_on_texts_alone() -> None:
    digests = [f"{n:03d}" for n in range(50)]
    chosen = choose_held_out(digests, 0.1)
    shuffled = random.Random(0).sample(digests, 50)
    assert len(chosen) == 5
    assert choose_held_out([*shuffled, *shuffled], 0.1) == chosen
    assert len(choose_held_out(digests[:3], 0.01)) == 1


def test_the_demo_conversations_are_usable() -> None:
    conversations = read_conversations("demo")
    assert len(conversations) >= 60
    assert len({one.turns for one in conversations}) == len(conversations)
    data = open_instructions(override(Config(), {"instructions": "demo", "context_length": 128}))
    assert not data.warnings


def test_equal_records_from_the_hub_are_read_like_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    lines = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    columns = ("instruction", "output", "messages")  # a data set has every column in every row
    rows = [{name: line.get(name) for name in columns} for line in lines]
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: {"org/set": rows}[name])
    hub, file = (read_conversations(s) for s in ("hf:org/set", str(folder / "pairs.jsonl")))
    assert [one.turns for one in hub] == [one.turns for one in file]
    with pytest.raises(DataError, match="hf:org/none: cannot be read"):
        read_conversations("hf:org/none")


def test_rates_are_parts_of_the_presets_and_adapters_are_adamws() -> None:
    def begun(*more: str) -> dict[str, Any]:
        command = parse(["--init_from=x", "--instructions=demo", *more], "finetune")
        return to_flat(begin_tuning(command, command.over(preset("modern-micro"))))

    def optim(settings: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(settings[name] for name in ("optimizer", "max_lr", "muon_lr"))

    assert optim(to_flat(preset("modern-micro"))) == ("muon", 4e-3, 1e-2)
    assert optim(begun()) == ("muon", 4e-4, 1e-3)
    assert optim(begun("--max_lr=1e-3", "--muon_lr=2e-3")) == ("muon", 1e-3, 2e-3)
    assert optim(begun("--lora_r=4"))[:2] == ("adamw", 2e-3)
    with pytest.raises(ConfigError, match="--optimizer muon: is for the matrices of the blocks"):
        begun("--lora_r=4", "--optimizer=muon")


# -- runs ------------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_is_logged_like_any(folder: Path) -> None:
    run = folder / "runs" / "whole"
    steps, evals = launch.steps(run), launch.events(run, "eval")
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    assert [event["step"] for event in evals] == [0, 3, 6]
    assert evals[-1]["val_loss"] < evals[0]["val_loss"] - 0.1
    rows = rows_of(folder, "on")
    assert evals[0]["val_tokens"] == rows["val"].targets()
    for step, event in steps.items():
        assert event["tokens"] == 4 * CONTEXT * step
        assert event["tokens_per_second"] == pytest.approx(4 * CONTEXT / event["step_seconds"])
        assert 0 < event["targets"] < 4 * CONTEXT / 2  # answers alone
    assert f"tok/s | targets {steps[1]['targets']} | mfu n/a" in (run / "log.txt").read_text()
    assert launch.events(run, "checkpoint")[-1]["kind"] == "final"
    assert json.loads((run / "status.json").read_text())["resume"].find("src/finetune.py") > 0


def test_what_a_step_trained_on_can_be_read_back(folder: Path) -> None:
    run = folder / "runs" / "whole"
    tokens = tokens_of_step(run, 4)
    assert tokens.windows.shape == (4, CONTEXT + 1)
    assert tokens.hash == launch.steps(run)[4]["batch_hash"]
    told = describe_tokens(run, tokens, as_text=True)
    assert re.search(r"--- sample 12: pairs_train row \d+\n<\|endoftext\|>### Instruction:\n", told)


def test_its_report_names_the_conversations(folder: Path) -> None:
    page = render(folder / "runs" / "whole")
    assert ", on pairs.jsonl, begun" in page
    assert "data_dir" not in page[: page.index("settings of the last start")]


def test_stopped_and_resumed_it_is_the_same_run(folder: Path, tmp_path: Path) -> None:
    flags = flags_of(folder, tmp_path, "cut")
    finetune([*flags, "--stop_after_steps=2"])
    finetune([f"--checkpoint_dir={tmp_path}", "--run_name=cut", "--resume=latest"])
    whole, cut = folder / "runs" / "whole", tmp_path / "cut"
    assert launch.losses(cut) == launch.losses(whole)
    assert launch.parameter_hash(cut, 6) == launch.parameter_hash(whole, 6)
    (resume,) = launch.events(cut, "resume")
    assert (resume["level"], resume["verified_batches"]) == ("bit-identical", [2])


def test_two_processes_with_adapters_take_the_same_way_and_one_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    lora = ("--lora_r=2", "--drift_check_freq=1")
    finetune(flags_of(folder, tmp_path, "one", *lora))
    two = flags_of(folder, tmp_path, "two", *lora, "--stop_after_steps=4")
    done = launch.train(two, world=2, program=FINETUNE)
    assert done.returncode == 0, done.stderr
    finetune([f"--checkpoint_dir={tmp_path}", "--run_name=two", "--resume=latest"])
    one, two_steps = launch.steps(tmp_path / "one"), launch.steps(tmp_path / "two")
    for step, event in one.items():
        assert two_steps[step]["loss"] == pytest.approx(event["loss"], rel=1e-5)
        assert two_steps[step]["batch_hash"] == event["batch_hash"]
        assert two_steps[step]["tokens"] == event["tokens"]


@pytest.mark.parametrize(
    ("modes", "lora"),
    [(("fsdp", "zero1"), ("--lora_r=2",)), (("zero1", "fsdp"), ())],
    ids=["adapters", "all-weights"],
)
def test_what_each_process_holds_changes_nothing(
    modes: tuple[str, str], lora: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    """Three steps in each mode, resumed in the other: the losses, evaluations and files of one process."""
    finetune(flags_of(folder, tmp_path, "one", *lora))
    begin = flags_of(folder, tmp_path, "two", *lora, "--stop_after_steps=3")
    go_on = [f"--checkpoint_dir={tmp_path}", "--run_name=two", "--resume=latest"]
    recompute = "--activation_checkpointing=block"
    for flags, mode in ((begin, modes[0]), ([*go_on, recompute], modes[1])):
        done = launch.train([*flags, f"--parallel={mode}"], world=2, program=FINETUNE)
        assert done.returncode == 0, done.stderr
    one, two = tmp_path / "one", tmp_path / "two"
    expected, found = launch.steps(one), launch.steps(two)
    assert list(found) == list(expected) == [1, 2, 3, 4, 5, 6]
    for step, event in expected.items():
        assert found[step]["loss"] == pytest.approx(event["loss"], rel=1e-5)
        assert found[step]["batch_hash"] == event["batch_hash"]
    losses = [[event["val_loss"] for event in launch.events(run, "eval")] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name in ("step_00000003/model", "step_00000003/optim", "step_00000006/model"):
        tensors, others = (load_file(run / f"{name}.safetensors") for run in (one, two))
        assert {key: value.shape for key, value in others.items()} == {
            key: value.shape for key, value in tensors.items()
        }


def test_other_conversations_are_refused_on_resume(folder: Path, tmp_path: Path) -> None:
    pairs = Path(shutil.copy(folder / "pairs.jsonl", tmp_path))
    flags = [f"--checkpoint_dir={tmp_path / 'runs'}", "--run_name=r"]
    finetune(
        [
            *flags_of(folder, tmp_path / "runs", "r", "--stop_after_steps=2"),
            f"--instructions={pairs}",
        ]
    )
    spaced = pairs.read_text().replace('": "', '":  "')  # other bytes, the same conversations
    pairs.write_text(spaced)
    moved = shutil.move(pairs, tmp_path / "moved.jsonl")
    finetune([*flags, "--resume=latest", f"--instructions={moved}", "--stop_after_steps=3"])
    moved.write_text(spaced.replace("And?", "Then?"))
    with pytest.raises(
        ConfigError, match=r"would change its mathematics: data .*allow_change data"
    ):
        finetune([*flags, "--resume=latest"])
    with pytest.raises(ConfigError, match=r"packing on -> off"):
        finetune([*flags, "--resume=latest", "--packing=off"])


def test_each_program_continues_its_own_runs(folder: Path, tmp_path: Path) -> None:
    flags = [f"--checkpoint_dir={folder / 'runs'}", "--run_name=whole", "--resume=latest"]
    with pytest.raises(ConfigError, match=r"run whole was begun by src/finetune\.py; continue it"):
        pretrain(parse(flags))
    plan = plan_continuation(
        str(folder / "runs" / "whole"),
        num_gpus=2,
        argv=["--max_steps=9", "--allow_change=max_steps"],
    )
    assert "--nproc_per_node=2" in write(plan, output="command")
    assert "src/finetune.py --resume latest" in write(plan, output="command")


def test_a_run_that_no_longer_improves_stops_and_is_saved(folder: Path, tmp_path: Path) -> None:
    """At a rate of 3 the loss only grows: the best is the first evaluation, and two more are one too many."""
    more = ("--max_lr=3", "--warmup_steps=0", "--max_steps=20", "--eval_freq=2", "--grad_clip=0")
    finetune(flags_of(folder, tmp_path, "r", *more, "--early_stopping_patience=2"))
    evals = {event["step"]: event["val_loss"] for event in launch.events(tmp_path / "r", "eval")}
    best = min((n for n in evals if n), key=lambda n: evals[n])
    (stop,) = launch.events(tmp_path / "r", "stop")
    assert (stop["reason"], stop["step"]) == ("early stopping", best + 4)
    assert max(evals) == best + 4 < 20
    assert json.loads((tmp_path / "r" / "status.json").read_text())["state"] == "stopped"
    assert (tmp_path / "r" / f"step_{best + 4:08d}").is_dir()


# -- bad input -------------------------------------------------------------------------------------------------------

GOOD = json.dumps({"instruction": "Hi", "output": "Hello"})
LINES = {
    "no JSON": ("{'a': 1}", "not JSON"),
    "not UTF-8": ("\udcff", "not JSON"),
    "a list": ("[1, 2]", "list, not an object"),
    "other keys": (
        '{"question": "Hi", "answer": "Yo"}',
        'it has question, answer; needed is "mess',
    ),
    "a number": ('{"instruction": 7, "output": "Yo"}', '"instruction" is int, not text'),
    "no content": ('{"messages": [{"role": "user"}]}', '"content" is NoneType, not text'),
    "no list": ('{"messages": "Hi"}', '"messages" is not a list'),
    "wrong role": (
        '{"messages": [{"role": "human", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}',
        "role 'human' where 'user' is due",
    ),
    "unanswered": ('{"messages": [{"role": "user", "content": "Hi"}]}', "last message must be the"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_broken_line_is_named_with_its_place(name: str, folder: Path, tmp_path: Path) -> None:
    line, part = LINES[name]
    path = tmp_path / "pairs.jsonl"
    content = "\n".join([GOOD, "", line, line, GOOD])
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError) as caught:
        finetune([*flags_of(folder, tmp_path / "runs", "r"), f"--instructions={path}"])
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert part in message
    assert message.endswith("(and 1 more like it); mend the record or remove it")
    assert "\n" not in message
    assert not (tmp_path / "runs").exists()


def test_empty_and_long_ones_are_left_out_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    lines = [
        *({"instruction": f"Say {n}", "output": f"{n}"} for n in range(4)),
        {"instruction": "Say nothing", "output": " \n"},
        {"instruction": "Say much", "output": "much " * CONTEXT},
        {"instruction": "Say more", "output": "more " * CONTEXT},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    settings = {"instructions": str(path), "context_length": CONTEXT}
    data = open_instructions(override(Config(), settings))
    assert data.conversations == {"train": 3, "val": 1}
    empty, long = data.warnings
    assert empty == f"1 conversations with an empty answer left out, first {path}:5"
    assert long.startswith("2 of 7 conversations are longer than the context of 64 tokens")
    assert re.search(rf"first {path}:6 has \d+$", long)
    path.write_text("\n".join(map(json.dumps, lines[4:])))
    with pytest.raises(DataError, match="of 0 usable conversations none is left for train"):
        open_instructions(override(Config(), settings))
    path.write_text("\n\n")
    with pytest.raises(DataError, match=r"no conversations in it; a line holds \"messages\""):
        open_instructions(override(Config(), settings))


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (("--instructions=none.jsonl",), ("none.jsonl: No such file", "hf:NAME or demo")),
        (("--init_from=runs/none/x",), ("runs/none/x: no such folder",)),
        (("--n_layer=2",), ("n_layer 2 does not fit --init_from",)),
        (
            ("--lora_r=2", "--lora_targets=c_attn,q_proj"),
            ("'q_proj' matches no", "c_attn, c_fc, c_"),
        ),
        (("--lora_targets=c_attn",), ("--lora_targets goes with --lora_r N",)),
        (("--lora_r=-1",), ("lora_r -1 must be at least 0",)),
        (("--val_fraction=1",), ("val_fraction 1.0 must be in (0, 1)",)),
        (("--data_dir=data",), ("--data_dir is for pretraining",)),
        (("--fit_schedule",), ("unknown flag --fit_schedule: it belongs to src/train.py",)),
        (("--mini_batch_size=auto",), ("auto is for pretraining",)),
    ],
)
def test_settings_that_cannot_work_are_one_line(
    change: tuple[str, ...], parts: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    flags = flags_of(folder, tmp_path / "runs", "r")
    names = {flag.partition("=")[0] for flag in change}
    kept = [flag for flag in flags if flag.partition("=")[0] not in names]
    with pytest.raises(GPT2LabError) as caught:
        finetune([*kept, *change])
    line = str(caught.value)
    assert "\n" not in line
    assert all(part in line for part in parts), line
    assert not (tmp_path / "runs").exists()


def test_the_door_lists_plans_and_refuses(folder: Path, tmp_path: Path) -> None:
    """Without torch: what it prints comes in the time that Python takes to start."""
    flags = flags_of(folder, tmp_path / "runs", "r", "--dry_run")
    planned = launch.train(flags, program=FINETUNE)
    assert planned.returncode == 0
    assert f"{folder / 'pairs.jsonl'}, 22 conversations in" in planned.stdout
    listed = launch.train(
        ["--list_checkpoints", f"--checkpoint_dir={folder / 'runs'}"], program=FINETUNE
    )
    assert "whole" in listed.stdout
    refused = launch.train([*flags, "--lora=8"], program=FINETUNE)
    assert (refused.returncode, refused.stderr) == (
        2,
        "error: unknown flag --lora: did you mean --lora_r?\n",
    )
    theirs = launch.train(["--lora_r=8"])
    assert theirs.stderr == "error: unknown flag --lora_r: it belongs to src/finetune.py\n"
    assert not (tmp_path / "runs").exists()


def test_help_shows_no_flag_that_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    shown: dict[Recipe, str] = {"pretrain": "", "finetune": ""}
    for recipe in shown:
        with pytest.raises(SystemExit):
            parse(["--help"], recipe)
        shown[recipe] = capsys.readouterr().out
    for flag in ("--import_checkpoint", "--trust", "--fit_schedule"):
        assert flag in shown["pretrain"]
        assert flag not in shown["finetune"]
    assert "--lora_r" not in shown["pretrain"]
    assert "--lora_r" in shown["finetune"]


def test_preflight_tries_a_step_on_the_answers(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = [*flags_of(folder, tmp_path / "runs", "r", "--lora_r=2"), "--preflight", "--json"]
    monkeypatch.setattr(sys, "argv", ["src/finetune.py", *flags])
    assert preflight(parse(flags, "finetune"), recipe=FINETUNING) == 0
    told = json.loads(capsys.readouterr().out)
    details = {check["name"]: check["detail"] for check in told["checks"]}
    assert "22 conversations in" in details["data"]
    (loss,) = re.findall(r"loss (\d+\.\d+)", details["step"])
    assert float(loss) == pytest.approx(math.log(NUM_TOKENS), rel=0.02), "of a random model"
    assert "src/finetune.py --init_from" in told["command"]
    assert not (tmp_path / "runs").exists()


def test_a_start_without_model_or_conversations_says_what_is_missing(
    folder: Path, tmp_path: Path
) -> None:
    flags = flags_of(folder, tmp_path / "runs", "r")
    for name in ("init_from", "instructions"):
        with pytest.raises(ConfigError, match=f"--{name} is missing"):
            finetune([flag for flag in flags if not flag.startswith(f"--{name}=")])


def test_a_model_of_another_vocabulary_is_refused(tmp_path: Path, tiny_flags: list[str]) -> None:
    pretrain(parse([*tiny_flags, "--max_steps=1"]))
    run = tmp_path / "runs" / "tiny"
    with pytest.raises(ConfigError, match="vocab_size 256 is below GPT-2's 50257"):
        finetune(
            [f"--init_from={run}", "--instructions=demo", f"--checkpoint_dir={tmp_path / 'new'}"]
        )
    assert not (tmp_path / "new").exists()
