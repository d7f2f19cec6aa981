r"""The chat template: a conversation in a tokenizer's ids. No torch.

<|endoftext|>[SYSTEM\n\n]### Instruction:\nUSER\n\n### Response:\nASSISTANT<|endoftext|>### Instruction:\n...

<|endoftext|> stands for the tokenizer's end of text. A conversation begins with it, as documents do in pretraining,
and every answer ends with it. So two of them in a row always mark the end of one conversation and the start of the
next (finetuning/packed.py relies on it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpt2lab.tokenizers.interface import END_TOKEN, Tokenizer

NAME = "gpt2lab-instruction/1"  # part of the data's fingerprint

# The same for transformers, in tokenizer_config.json of an export; a test compares the two.
JINJA = (
    "{{ '<|endoftext|>' }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] | trim }}{{ '\\n\\n' }}"
    "{% elif m['role'] == 'user' %}{{ '### Instruction:\\n' }}{{ m['content'] | trim }}{{ '\\n\\n### Response:\\n' }}"
    "{% else %}{{ m['content'] | trim }}{{ '<|endoftext|>' }}{% endif %}{% endfor %}"
)


def jinja(end_token: str) -> str:
    """Return the template for transformers with another end of text."""
    return JINJA.replace(END_TOKEN, end_token)


def as_prompt(text: str) -> str:
    """Format one user turn, up to where the answer begins."""
    return f"### Instruction:\n{text}\n\n### Response:\n"


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


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: str  # user | assistant; the first may be system
    text: str
