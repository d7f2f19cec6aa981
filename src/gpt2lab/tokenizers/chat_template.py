r"""The chat template: a conversation in a tokenizer's ids. No torch.

<|endoftext|>[SYSTEM\n\n]### Instruction:\nUSER\n\n### Response:\nASSISTANT<|endoftext|>### Instruction:\n...

<|endoftext|> stands for the tokenizer's end of text. A conversation begins with it, like a document in pretraining,
and every answer ends with it. So two of them in a row always mark the end of one conversation and the start of the
next (finetuning/packed.py relies on it).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpt2lab.errors import DataError
from gpt2lab.tokenizers.interface import END_TOKEN, Tokenizer

NAME = "gpt2lab-instruction/1"  # part of the data's fingerprint

# The same for transformers, written to an export's tokenizer_config.json; a test compares the two.
JINJA = (
    "{{ '<|endoftext|>' }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] | trim }}{{ '\\n\\n' }}"
    "{% elif m['role'] == 'user' %}{{ '### Instruction:\\n' }}{{ m['content'] | trim }}{{ '\\n\\n### Response:\\n' }}"
    "{% else %}{{ m['content'] | trim }}{{ '<|endoftext|>' }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: str  # user | assistant; the first may be system
    text: str


def jinja(end_token: str) -> str:
    """Return the template for transformers with another end of text."""
    return JINJA.replace(END_TOKEN, end_token)


_INSTRUCTION, _RESPONSE = "### Instruction:\n", "### Response:\n"


def as_prompt(text: str) -> str:
    """Format one user turn, up to where the answer begins."""
    return f"{_INSTRUCTION}{text}\n\n{_RESPONSE}"


def can_be_written(tokenizer: Tokenizer) -> bool:
    """Tell whether a tokenizer has ids for the template's own text; one of few characters may not."""
    try:
        tokenizer.encode(as_prompt(""))
    except DataError:
        return False
    return True


def encode(turns: Sequence[Turn], tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Return the ids of a conversation, and which belong to answers, each with the <|endoftext|> after it.

    Prompt and answer are encoded separately, so that the ids of a prompt do not depend on the answer.
    """
    end = tokenizer.end_of_text
    ids, is_answer, system = [end], [False], ""
    for turn in turns:
        if turn.role == "system":
            system = f"{turn.text}\n\n"
            continue
        if turn.role == "assistant":
            added = [*tokenizer.encode(turn.text), end]
        else:
            added, system = tokenizer.encode(system + as_prompt(turn.text)), ""
        ids += added
        is_answer += [turn.role == "assistant"] * len(added)
    return ids, is_answer


def encode_typed(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of the template typed as text: its end of text becomes the control token, not its letters.

    Prompts and answers are encoded separately, as in training.
    """
    ids: list[int] = []
    for number, part in enumerate(text.split(tokenizer.end_token)):
        prompt, response, answer = part.partition(_RESPONSE)
        ids += [tokenizer.end_of_text] if number else []
        ids += tokenizer.encode(prompt + response) + (tokenizer.encode(answer) if answer else [])
    return ids


def prompt_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids before an answer to `text`: a user's message, or the template typed as text.

    The leading end of text may be left out.
    """
    if _INSTRUCTION not in text:
        return encode([Turn("user", text.strip())], tokenizer)[0]
    ids = encode_typed(text, tokenizer)
    return ids if ids[:1] == [tokenizer.end_of_text] else [tokenizer.end_of_text, *ids]


def begins_answer(ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Tell whether an answer follows these ids of a prompt, by what all prompts end with."""
    one, other = (tokenizer.encode(as_prompt(text))[::-1] for text in ("", "n"))
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    end = [id for id, _ in same][::-1]
    return list(ids[-len(end) :]) == end


def alternating(turns: Sequence[Turn], *, last: Literal["user", "assistant"]) -> tuple[Turn, ...]:
    """Return the turns if user and assistant alternate after at most one system turn, up to one of `last`.

    The chat templates of most models on the Hub require the same. An empty system message is dropped.

    Raises: ValueError.
    """
    after_system = turns[1:] if turns and turns[0].role == "system" else turns
    for place, turn in enumerate(after_system):
        expected = "assistant" if place % 2 else "user"
        if turn.role != expected:
            raise ValueError(f"a message of role {turn.role!r} where {expected!r} is expected")
    if not after_system or after_system[-1].role != last:
        raise ValueError(f"the last message must be the {last}'s")
    return tuple(turns if turns[0].text else after_system)
