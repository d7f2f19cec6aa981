"""docs/guide.md: every message that it quotes is one that the program prints, every flag and script exists."""

from __future__ import annotations

import ast
import re

from gpt2lab.config.command_line import Verbs
from gpt2lab.config.settings import LEAVES
from launch import REPOSITORY

GUIDE = (REPOSITORY / "docs" / "guide.md").read_text()
# Flags of torchrun, and of doors other than the trainer's, that the guide names.
OTHERS = {
    *("nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "shutdown-timeout"),
    *("gpu", "compare", "nodes", "interconnect", "out", "push_to_hub"),
    *("prompt", "num_samples", "interactive", "batch", "temperature", "top_k", "top_p"),
}


def texts_of_the_program() -> list[str]:
    """Return every piece of text that the source can print, those between an f-string's braces apart."""
    pieces = []
    for path in (REPOSITORY / "src").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and node not in docstrings:
                pieces.append(str(node.value))
    return pieces


def quoted() -> list[str]:
    """Return the lines of the guide's boxes."""
    boxes = re.findall(r"```text\n(.*?)```", GUIDE, flags=re.S)
    return [line for box in boxes for line in box.splitlines()]


def missing(line: str, texts: list[str]) -> list[str]:
    """Return the pieces of a quoted message that no text of the program holds."""
    pieces = [piece.strip() for piece in line.split("…")]
    return [piece for piece in pieces if piece and not any(piece in text for text in texts)]


def test_every_quoted_message_is_in_the_source() -> None:
    lines, texts = quoted(), texts_of_the_program()
    assert len(lines) >= 12
    for line in lines:
        assert not missing(line, texts), line
        assert max(len(piece) for piece in line.split("…")) > 10, line  # enough to search for
    assert missing("process … is slow: … s of its own a day", texts) == ["s of its own a day"]


def test_every_problem_quotes_a_message_and_names_a_flag() -> None:
    problems = GUIDE.partition("## When something is wrong")[2].partition("\n## ")[0]
    parts = re.split(r"^\*\*", problems, flags=re.M)[1:]
    assert len(parts) == 7
    for part in parts:
        assert "```text\n" in part, part
        assert re.search(r"`--\w+", re.sub(r"```.*?```", "", part, flags=re.S)), part


def test_every_flag_script_and_target_of_the_guide_exists() -> None:
    flags = set(re.findall(r"--([a-z][\w-]+)", GUIDE))
    unknown = flags - set(LEAVES) - set(Verbs.__dataclass_fields__) - OTHERS
    assert not unknown
    for script in re.findall(r"scripts/\w+\.\w+", GUIDE):
        assert (REPOSITORY / script).is_file(), script
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"make (tensorboard\S*|report|plot)\b", GUIDE):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.M), target
