"""Text samples of fine-tuning read their prompt exactly as training reads it: same ids, same positions, same logits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import launch
from conversations import finetune, flags_of, rows_of, write_both
from gpt2lab.errors import DataError
from gpt2lab.finetuning.conversations import read_conversations
from gpt2lab.finetuning.packed import hidden_of_rows
from gpt2lab.runs.target import find_target
from gpt2lab.runs.weights import load_weights
from gpt2lab.tokenizers import chat_template
from gpt2lab.tokenizers.chat_template import Turn, as_prompt, can_be_written, encode, prompt_ids
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, GPT2
from gpt2lab.tokenizers.plain import BYTES, CharactersTokenizer
from gpt2lab.training import evaluator


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_both(tmp_path_factory.mktemp("samples"))


@pytest.fixture(scope="module")
def sampled(folder) -> tuple[str, list[list[int]]]:
    """Return what a user says in the training rows, and the prompts that a run with it sampled from."""
    question = read_conversations(str(folder / "pairs.jsonl"))[0].turns[0].text
    seen: list[list[int]] = []
    real = evaluator.sample_text

    def watch(model: Any, prompt: Sequence[int], *rest: Any, **more: Any) -> str | None:
        seen.append(list(prompt))
        return real(model, prompt, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluator, "sample_text", watch)
        more = ("--max_steps=2", "--sample_freq=1", f"--sample_prompt={question}")
        finetune(flags_of(folder, folder / "runs", "tuned", *more))
    return question, seen


def test_the_samples_logits_are_those_of_trainings_rendering(folder, sampled):
    question, seen = sampled
    for event in launch.events(folder / "runs" / "tuned", "sample"):
        assert event["text"].startswith(as_prompt(question))
    model = load_weights(find_target("tuned", folder / "runs")).eval()
    assert len(seen) == 2
    prompt = seen[0]
    assert prompt == seen[1]
    compared = 0
    for rows in rows_of(folder, "on").values():  # packed: the conversation stands anywhere in a row
        for row in rows.ids.astype(np.int64):
            ids = torch.from_numpy(row)[None]
            for begin in np.flatnonzero(row == END_OF_TEXT):
                if row[begin : begin + len(prompt)].tolist() != prompt:
                    continue
                with torch.no_grad():
                    hidden = hidden_of_rows(model, ids[:, :-1], END_OF_TEXT)
                    expected = model.head(hidden)[0, begin + len(prompt) - 1]
                    found = model.head(model.extend(torch.tensor([prompt]), model.new_caches()))
                torch.testing.assert_close(found[0, -1], expected, rtol=1e-5, atol=1e-5)
                compared += 1
    assert compared > 0


@pytest.mark.parametrize("tokenizer", [GPT2, BYTES])
def test_a_prompt_is_a_user_or_the_template_as_it_is_typed(tokenizer):
    alone = encode([Turn("user", "Who?")], tokenizer)[0]
    for typed in ("Who?", " Who? ", as_prompt("Who?"), f"<|endoftext|>{as_prompt('Who?')}"):
        assert prompt_ids(typed, tokenizer) == alone
    turns = [Turn("system", "Be brief."), Turn("user", "Who?"), Turn("assistant", "I.")]
    turns.append(Turn("user", "Why?"))
    typed = f"<|endoftext|>Be brief.\n\n{as_prompt('Who?')}I.<|endoftext|>{as_prompt('Why?')}"
    assert prompt_ids(typed, tokenizer) == encode(turns, tokenizer)[0]
    # What a user says holds no control token, whatever it looks like.
    assert encode([Turn("user", "<|endoftext|>")], tokenizer)[0].count(tokenizer.end_of_text) == 1


def test_a_tuned_models_prompt_may_hold_the_control_token(folder, sampled):
    from gpt2lab.evaluation.completion import Completer, SamplingParams

    style = SamplingParams(max_new_tokens=2)
    for name, count in (("tuned", 1), (str(folder / "hf"), 0)):
        how = {"device": "cpu", "dtype": "fp32", "style": style}
        completer = Completer(name, checkpoint_dir=folder / "runs", **how)
        ids = completer.encode(f"<|endoftext|>{as_prompt('Who?')}")
        assert ids.count(END_OF_TEXT) == count
        assert (ids == encode([Turn("user", "Who?")], GPT2)[0]) == bool(count)


def test_a_tokenizer_of_few_characters_cannot_write_the_template():
    assert can_be_written(GPT2)
    assert not can_be_written(CharactersTokenizer("abc\n"))
    assert chat_template.encode_typed("ab", CharactersTokenizer("abc\n")) == [0, 1]


def test_a_conversation_without_ids_is_named(folder):
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: the character 'C' "):
        rows_of(folder, "on", CharactersTokenizer(as_prompt("")))
