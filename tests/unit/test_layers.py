"""The layers of the code: which package may import which, and what must answer without torch."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "gpt2lab"

# The core, top first: a package imports only from itself and from those above it, and never from a satellite.
CORE = [
    *("errors", "paths", "fmt", "files", "config", "tokenizers", "model", "optim", "distributed"),
    *("checkpoint", "data", "runs", "evaluation", "training"),
]
# A satellite imports the core, and of the other satellites only those named here.
SATELLITES: dict[str, set[str]] = {
    "planner": set(),
    "mirror": set(),
    "tracking": set(),
    "interop": set(),
    "finetuning": set(),
    "report": {"planner", "tracking"},
    "lab": {"mirror", "planner", "report"},
    "serving": set(),
}

# What lists, plans, prints help or rejects a command line must answer at once: these never import torch, at any depth.
WITHOUT_TORCH = [
    *("errors", "paths", "fmt", "files", "config", "tokenizers", "planner", "runs.history"),
    *("runs.summary", "runs.overview", "runs.folder", "runs.console", "report.page"),
    *("checkpoint.catalog", "data.manifest", "data.shards", "interop.token_files", "data.order"),
    *("data.mixture", "training.resolve", "training.recipe", "finetuning.recipe"),
    "commands.dry_run",
]
# Their functions import torch when they are called, to build or to measure.
LATE = {"planner.forecast", "training.resolve", "training.recipe", "finetuning.recipe"}
LATE.add("commands.dry_run")
# These commands compute: commands/train.py imports them once it is clear that they are wanted.
COMPUTING = {"commands.preflight"}
# Before the layers: the API, whose names are imported when they are used, and the entry points.
ENTRANCES = {"", "__main__", "train", "finetune"}
HEAVY = {"torch", "datasets", "huggingface_hub", "matplotlib", "transformers", "pandas"}


PARTS = {path: path.relative_to(PACKAGE).with_suffix("").parts for path in PACKAGE.rglob("*.py")}
# By names such as `data.order`; a package's `__init__` has the package's name.
FILES = {".".join(p for p in PARTS[path] if p != "__init__"): path for path in sorted(PARTS)}


@functools.cache
def imported_names(source: str, *, at_top_level: bool = False) -> set[str]:
    """Return the full names of all that a source imports: also inside functions and for type checkers, or not."""
    names: set[str] = set()

    def statements(tree: ast.AST) -> Iterator[ast.AST]:
        for node in ast.iter_child_nodes(tree):
            yield node
            is_late = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            if not (at_top_level and (is_late or is_for_types)):
                yield from statements(node)

    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            module = str(node.module)
            if (node.level, module) == (1, "configuration_gpt2lab"):
                # The modelling file lies beside it in an exported folder, where transformers asks for this form.
                module = f"gpt2lab.interop.{module}"
            else:
                assert node.level == 0, "imports are absolute"
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def own_module(name: str) -> str | None:
    """Return the module of this project that an imported name lies in, None for other projects."""
    if name.split(".")[0] != "gpt2lab":
        return None
    inside = name.removeprefix("gpt2lab").removeprefix(".")
    while inside not in FILES:  # a name within the module
        inside = inside.rpartition(".")[0]
    return inside


def needs(module: str, *, at_top_level: bool = False) -> set[str]:
    names = imported_names(FILES[module].read_text(), at_top_level=at_top_level)
    return {found for name in names if (found := own_module(name)) is not None}


def way_to(module: str, heavy: set[str], *, at_top_level: bool) -> list[str] | None:
    """Return a chain of imports from a module to a heavy package, None if there is none."""
    ways, waiting = {module: [module]}, [module]
    while waiting:
        here = waiting.pop()
        # An entrance imports the rest when it is asked for.
        at_once = at_top_level or here in ENTRANCES
        names = imported_names(FILES[here].read_text(), at_top_level=at_once)
        # safetensors itself takes 10 ms; its module for torch brings torch.
        packages = {name.replace("safetensors.torch", "torch").split(".")[0] for name in names}
        if found := packages & heavy:
            return [*ways[here], *found]
        for there in needs(here, at_top_level=at_once) - set(ways):
            ways[there] = [*ways[here], there]
            waiting.append(there)
    return None


def test_reading_imports_finds_them_all() -> None:
    source = """
from typing import TYPE_CHECKING
import torch.nn as nn
from gpt2lab import fmt
if TYPE_CHECKING:
    from gpt2lab.data.order import Order
def late():
    from gpt2lab.model.gpt import GPT
"""
    own = {own_module(name) for name in imported_names(source)}
    assert own == {None, "fmt", "data.order", "model.gpt"}
    assert "torch.nn" in imported_names(source)
    assert "gpt2lab.model.gpt.GPT" not in imported_names(source, at_top_level=True)


def room(module: str) -> str:
    return module.split(".")[0]


def test_every_package_has_its_room() -> None:
    found = {room(module) for module in FILES} - ENTRANCES
    assert found == {*CORE, *SATELLITES, "commands"}


def test_no_import_of_the_core_climbs() -> None:
    climbing = [
        f"{module} -> {needed}"
        for module in FILES
        for needed in needs(module) - ENTRANCES
        if room(module) in CORE
        and (room(needed) not in CORE or CORE.index(room(needed)) > CORE.index(room(module)))
    ]
    assert climbing == []


def test_satellites_import_the_core_and_the_satellites_named() -> None:
    strange = [
        f"{module} -> {needed}"
        for module in FILES
        if room(module) in SATELLITES
        for needed in needs(module) - ENTRANCES
        if room(needed) not in {*CORE, room(module), *SATELLITES[room(module)]}
    ]
    assert strange == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    waiting = {module: needs(module) - {module} - ENTRANCES for module in set(FILES) - ENTRANCES}
    while free := [module for module, needed in waiting.items() if not needed & set(waiting)]:
        for module in free:
            del waiting[module]
    assert waiting == {}


def test_quick_answers_do_not_import_torch() -> None:
    for module in FILES:
        if any(module == quick or module.startswith(f"{quick}.") for quick in WITHOUT_TORCH):
            assert way_to(module, {"torch"}, at_top_level=module in LATE) is None
        if module in ENTRANCES or (module.startswith("commands.") and module not in COMPUTING):
            assert way_to(module, HEAVY, at_top_level=True) is None
