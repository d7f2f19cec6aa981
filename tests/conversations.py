"""A tiny GPT-2 with the real vocabulary, a few dozen conversations, and the flags of a run over both."""

import json
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2lab.config.schema import Config
from gpt2lab.config.settings import override
from gpt2lab.data.order import Order
from gpt2lab.evaluation.completion import SamplingParams
from gpt2lab.finetuning.recipe import FINETUNING
from gpt2lab.finetuning.rows import Rows, open_instructions
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.interface import Tokenizer
from tiny import parse, pretrain

CONTEXT = 64


def order_of(rows: Rows, seed: int = 1) -> Order:
    """Return the order that a run with --shuffle windows gives to rows."""
    T = rows.ids.shape[1] - 1
    return Order([len(rows) * T + 1], context_length=T, shuffle="windows", seed=seed)


def write_model(folder: Path) -> Path:
    """Write a random Hugging Face GPT-2 of one layer, 16 wide."""
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": CONTEXT, "vocab_size": 50257}
    ends = {"bos_token_id": 50256, "eos_token_id": 50256}
    config = GPT2Config(**shape, **ends, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def write_pairs(path: Path, count: int = 24) -> Path:
    """Write pairs of different lengths, every sixth a conversation of two questions."""
    lines = []
    for n in range(count):
        up, on = " up" * (n % 4), " on" * (n % 3)
        pair = {"instruction": f"Count.{up}", "output": f"{n} {n + 1}{on}"}
        if n % 6 == 5:
            turns = [("user", "Hi"), ("assistant", f"{n}"), ("user", "And?"), ("assistant", "Bye")]
            pair = {"messages": [{"role": role, "content": text} for role, text in turns]}
        lines.append(json.dumps(pair))
    path.write_text("\n".join(lines) + "\n")
    return path


def write_both(folder: Path) -> Path:
    """Write the model `hf` and the pairs that `flags_of` names."""
    write_model(folder / "hf")
    write_pairs(folder / "pairs.jsonl")
    return folder


def flags_of(folder: Path, runs: Path, name: str, *more: str) -> list[str]:
    """Return the command line of a fresh run of six steps of four rows."""
    return [
        *(f"--init_from={folder / 'hf'}", f"--instructions={folder / 'pairs.jsonl'}"),
        *(f"--checkpoint_dir={runs}", f"--run_name={name}", "--max_steps=6", "--max_lr=0.01"),
        *(f"--total_batch_size={4 * CONTEXT}", "--mini_batch_size=2", "--eval_freq=3"),
        *("--device=cpu", "--dtype=fp32", "--compile=off", "--sample_tokens=2"),
        *more,
    ]


def finetune(flags: list[str]) -> None:
    """Run the recipe in this process."""
    pretrain(parse(flags, "finetune"), recipe=FINETUNING)


def rows_of(
    folder: Path, packing: str, tokenizer: Tokenizer = GPT2, **more: object
) -> dict[str, Rows]:
    settings = {"instructions": str(folder / "pairs.jsonl"), "packing": packing, **more}
    return open_instructions(
        override(Config(), {"context_length": CONTEXT, **settings}), tokenizer
    ).rows


class Echo:
    """A model for Chat that answers with the number of tokens that it was given, and remembers what that was."""

    context_length, tokenizer = CONTEXT, GPT2
    style = SamplingParams(max_new_tokens=12, temperature=0.0, top_k=0, seed=0)

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int | None]] = []

    def stream(self, ids: list[int], *, number: int, place: int, at_most: int | None) -> list[str]:
        self.asked.append((ids, at_most))
        return [" ", str(len(ids)), "\n"]
