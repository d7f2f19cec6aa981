"""README and docs: every link, test, script, flag and quoted message exists; repeated figures agree."""

import ast
import json
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import command as benchmark
from gpt2lab.commands.command_line import Actions
from gpt2lab.commands.verbs import VERBS, main, within
from gpt2lab.config.settings import LEAVES
from launch import REPOSITORY

PAGES = {
    str(path.relative_to(REPOSITORY)): path.read_text()
    for path in [
        REPOSITORY / "README.md",
        REPOSITORY / "CONTRIBUTING.md",
        *sorted((REPOSITORY / "docs").glob("*.md")),
        *sorted((REPOSITORY / "docs" / "log").glob("*.md")),
    ]
}
TROUBLE = PAGES["docs/troubleshooting.md"]
# Flags that the log names and the program has no more.
GONE = {"kwh", "self_test"}
# Flags of torchrun, pytest and ssh, which are not ours.
FOREIGN = {
    *("nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "shutdown-timeout"),
    *("max-restarts", "standalone", "check", "help", "help-all"),
    *("build-arg", "rm"),  # docker's
    *("model_args", "output_path"),  # lm-eval's
    *("torch-backend", "no-deps"),  # uv's
}


def missing(line: str, texts: list[str]) -> list[str]:
    """Return the parts of a quoted message that no text of the program holds."""
    parts = [part.strip() for part in line.split("…")]
    return [part for part in parts if part and not any(part in text for text in texts)]


def test_every_quoted_message_is_in_the_source():
    boxes = re.findall(r"```text\n(.*?)```", TROUBLE, flags=re.S)
    lines = [line for box in boxes for line in box.splitlines()]
    assert len(lines) >= 12
    texts = []  # that the source can print; an f-string gives what stands between its braces
    for path in (REPOSITORY / "src").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and node not in docstrings:
                texts.append(str(node.value))
    for line in lines:
        assert not missing(line, texts), line
        assert max(len(part) for part in line.split("…")) > 10, line  # enough to search for
    assert missing("is slow: … s of its own a day", texts) == ["s of its own a day"]
    # Every problem quotes a message and names a flag.
    parts = re.split(r"^\*\*", TROUBLE, flags=re.M)[1:]
    assert len(parts) == 9
    for part in parts:
        assert "```text\n" in part, part
        assert re.search(r"`--\w+", re.sub(r"```.*?```", "", part, flags=re.S)), part


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page, flags=re.S)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_path_and_cited_test_exists(page):
    folder = (REPOSITORY / page).parent
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (folder / path) if path else REPOSITORY / page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target.read_text()), link
    for path in re.findall(r"\b(?:scripts|tests|src|benchmarks)/[\w/]+\.(?:py|sh)\b", PAGES[page]):
        assert (REPOSITORY / path).is_file(), path
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in re.findall(r"(?:`|^)make ([a-z-]+)", PAGES[page], flags=re.M):
        assert re.search(rf"^(?:[a-z-]+ )*{target}(?: [a-z-]+)*:", makefile, re.M), target
    sources = {path.name: path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py")}
    for file, name in re.findall(r"`(?:[\w/]*/)?(test_\w+\.py)(?:::(\w+))?", PAGES[page]):
        assert file in sources, file
        assert f"def {name}" in sources[file], f"{file}::{name}"
    for name in re.findall(r"`(test_\w+)\*?`", PAGES[page]):
        assert any(f"def {name}" in source for source in sources.values()), name


def commands(text: str) -> list[list[str]]:
    """Return the words of every command line in a page's blocks and in its sentences."""
    blocks = "\n".join(re.findall(r"```(?:bash)?\n(.*?)```", text, flags=re.S))
    lines = blocks.replace("\\\n", " ").splitlines()
    plain = re.sub(r"```.*?```", "", text, flags=re.S)
    lines += re.findall(r"`((?:python|torchrun|gpt2lab) [^`]+)`", plain)
    starts = ("python ", "torchrun ", "gpt2lab ")
    return [shlex.split(line, comments=True) for line in lines if line.startswith(starts)]


FAMILIES = {
    "data": ("verify", "stats", "show", "import", "merge", "tokenizer train", "tokenizer show"),
    "runs": ("list", "rm", "archive", "sync", *within("runs")),
    "ladder": ("plan", "run", "fit", "predict"),
    "benchmark": tuple(benchmark.VERBS),
}


def flags_of(verb: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return the flags that a verb's help shows; `verb`: all its words."""
    with pytest.raises(SystemExit):
        main([*verb.split(), "--help-all"])
    shown = set(re.findall(r"--([a-z]\w*)", capsys.readouterr().out))
    # These hand others to the trainer.
    has_all = verb in ("ablate", "runs import", "runs resume-command")
    return shown | (set(LEAVES) if has_all else set())


def verb_of(words: list[str]) -> str | None:
    """Return the verb that a command line calls; None for a module or a test, which takes no flags of ours."""
    if words[0] == "gpt2lab":
        verb, *rest = words[1:]
        inner = [one for one in FAMILIES.get(verb, ()) if one.split() == rest[: len(one.split())]]
        return " ".join([verb, *inner[:1]])
    file = next((word for word in words if re.fullmatch(r"(src|scripts)/\w+\.py", word)), None)
    if file is None or file.startswith("src/"):
        return file and Path(file).stem
    (verb,) = re.findall(r'run\("(\S+)"\)', (REPOSITORY / file).read_text())
    return str(verb)


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_of_every_command_exists(page, capsys):
    known: dict[str, set[str]] = {}
    for words in commands(PAGES[page]):
        verb = verb_of(words)
        if verb is None or verb.startswith("-"):
            continue
        if verb not in known:
            known[verb] = flags_of(verb, capsys)
        # torchrun's own flags come before the program.
        at = next((i for i, word in enumerate(words) if word.endswith(".py")), 0)
        typed = {word.removeprefix("--") for word in words[at:] if word.startswith("--")}
        typed = {flag.partition("=")[0] for flag in typed} - {"help", "help-all"}
        assert typed <= known[verb], words


def test_every_flag_in_a_sentence_exists(capsys):
    known = {*LEAVES, *Actions.__dataclass_fields__, *FOREIGN}
    for verb in VERBS:
        for inner in FAMILIES.get(verb, ("",)):
            known |= flags_of(f"{verb} {inner}".strip(), capsys)
    for page, text in PAGES.items():
        gone = GONE if "/log/" in page else set()
        unknown = set(re.findall(r"(?<![\w-])--([a-z][\w-]+)", text)) - known - gone
        assert not unknown, f"{page}: {unknown}"


def test_the_picture_of_speeds_repeats_the_table():
    drawn = json.loads((REPOSITORY / "docs" / "benchmarks.json").read_text())
    rows: dict[str, list[str]] = {}
    for line in PAGES["docs/benchmarks.md"].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.setdefault(cells[0], [cell.replace(",", "") for cell in cells[1:]])
    names = {
        **{"gpt2lab, bf16": "ours", "gpt2lab, fp32": "ours in fp32"},
        **{"predecessor, bf16": "predecessor", "litgpt, bf16": "litgpt"},
        **{"nanoGPT, fp32": "nanoGPT", "Hugging Face, fp32": "Hugging Face"},
    }
    for column, speeds in enumerate(drawn["tokens_per_second"].values()):
        found = {name: rows[names[name]][column] for name in speeds}
        assert found == {name: str(speed) for name, speed in speeds.items()}
