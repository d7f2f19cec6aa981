r"""How a conversation is written in GPT-2's tokens. No torch.

<|endoftext|>[SYSTEM\n\n]### Instruction:\nUSER\n\n### Response:\nASSISTANT<|endoftext|>### Instruction:\n...

A conversation begins with <|endoftext|>, as documents do in pretraining, and every answer ends with it. So two of them
in a row, and nothing else, are the end of one conversation and the beginning of the next (see packed.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, gpt2_encoding

NAME = "gpt2lab-instruction/1"  # part of the data's fingerprint

# The same for transformers, in tokenizer_config.json of an export; tests/test_chat.py compares the two.
JINJA = (
    "{{ '<|endoftext|>' }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] | trim }}{{ '\\n\\n' }}"
    "{% elif m['role'] == 'user' %}{{ '### Instruction:\\n' }}{{ m['content'] | trim }}{{ '\\n\\n### Response:\\n' }}"
    "{% else %}{{ m['content'] | trim }}{{ '<|endoftext|>' }}{% endif %}{% endfor %}"
)


def as_prompt(text: str) -> str:
    """Write one user's turn, up to where the answer begins."""
    return f"### Instruction:\n{text}\n\n### Response:\n"


def encode(turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
    """Return the ids of a conversation, and which of them the assistant said: its text and the <|endoftext|> after it.

    Prompt and answer are encoded apart, so that the ids of a prompt do not depend on the answer.
    """
    encoding = gpt2_encoding()
    ids, is_answer, before = [END_OF_TEXT], [False], ""
    for turn in turns:
        if turn.role == "system":
            before = f"{turn.text}\n\n"
            continue
        if turn.role == "assistant":
            piece = [*encoding.encode_ordinary(turn.text), END_OF_TEXT]
        else:
            piece, before = encoding.encode_ordinary(before + as_prompt(turn.text)), ""
        ids += piece
        is_answer += [turn.role == "assistant"] * len(piece)
    return ids, is_answer


@dataclass(frozen=True)
class Turn:
    """What one side said."""

    role: str  # user | assistant; the first may be of the system
    text: str
