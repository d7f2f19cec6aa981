"""The rows of the code: who may import whom, and what must answer without torch."""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "gpt2lab"


def _rows(table: str) -> list[list[str]]:
    """Read a table of one row a line; an indented line goes on with the row above it."""
    return [row.split() for row in table.strip().replace("\n ", " ").splitlines()]


# Lowest first: a module imports only from rows above its own line here, so there are no cycles. A new module goes
# into the first row where that holds; if that row is far down for what it does, the module knows too much.
QUICK_ROWS = _rows("""
bench checkpoints data evaluation finetuning gpt2lab huggingface planning reliability runs sharding
config errors faults fmt interval paths tags  bench.gpu_watch bench.register_peak  planning.contention
  reliability.heartbeat reliability.spikes reliability.stop
door hardware schedule settings state  bench.operator_groups  checkpoints.manifest  data.hellaswag_source data.order
  data.pieces data.sources data.tokenizer  finetuning.adapters finetuning.conversations  planning.block_bytes
  planning.loss_prediction  reliability.deadline  runs.progress runs.tensorboard_server
plan presets  bench.token_stream  checkpoints.catalog  data.encode data.hellaswag_items data.shards
  evaluation.results  finetuning.template  huggingface.config  planning.profiles  runs.history
flags wandb_mirror  bench.shapes  checkpoints.disk checkpoints.listing  data.hellaswag_tokens data.shard_writer
  data.unfinished data.verifier  evaluation.target  finetuning.rows  planning.communication planning.memory
  planning.timing  runs.overview runs.plots
changes  bench.sharing bench.variants  data.adopt data.audit data.merge data.prepare data.windows
  evaluation.compare evaluation.style  finetuning.beginning  huggingface.init_from huggingface.model_card
  planning.calibration planning.job planning.machine  runs.summary
start  bench.contestants  data.ledger  planning.ask planning.cost planning.events planning.here planning.lr_rules
ablation  bench.running  planning.estimate  runs.resume_command
ablation_table  bench.race  planning.deadline planning.explain planning.setting
planning.report_json planning.report_text
planning.alternatives planning.gpu_report planning.remaining
planning.measuring planning.remedies planning.run_clock planning.scoring  runs.report
planning.card_presets planning.self_test
dry_run  planning.auto planning.planner
""")  # never torch: what lists, plans, refuses and reads answers in under half a second
TORCH_ROWS = _rows("""
attention compile_cache loss muon rng runtime telemetry  bench.ceilings bench.hf_loop bench.instrument
  bench.litgpt_setup bench.traffic  data.loader  runs.folder  sharding.pieces
exact_reduce model optim  bench.data bench.trainers  checkpoints.checkpoint  finetuning.loader  reliability.control
  reliability.drift reliability.facts reliability.stragglers  runs.tensorboard  sharding.zero1
attention_backend histograms recompute  bench.save  checkpoints.saver  evaluation.sample  finetuning.lora
  finetuning.packed  huggingface.folder  reliability.receipt reliability.rewind  sharding.fsdp
parallel  checkpoints.foreign checkpoints.weights
train_step  bench.sample  evaluation.completion evaluation.hellaswag evaluation.validation  finetuning.answers
  huggingface.export
measurements parts step_log  bench.hellaswag bench.live_bytes bench.sharing_worker  finetuning.answer_loss
  finetuning.chat  reliability.health
trainer  checkpoints.importing  evaluation.evaluate  finetuning.recipe  reliability.trials
pretrain  reliability.preflight
""")
ROWS = QUICK_ROWS + TORCH_ROWS
ROW_OF = {module: number for number, row in enumerate(ROWS) for module in row}

# What stands behind --help, --list_checkpoints, --dry_run and a refusal.
INSTANT = [
    *(
        "errors",
        "fmt",
        "config",
        "presets",
        "schedule",
        "plan",
        "paths",
        "checkpoints.manifest",
        "faults",
    ),
    *(
        "checkpoints.catalog",
        "runs.history",
        "checkpoints.listing",
        "flags",
        "start",
        "dry_run",
        "runs.summary",
        "door",
    ),
    "evaluation.results",
    *("data.tokenizer", "data.shards", "data.order"),
]
MAY_BE_NEEDED_FOR_AN_INSTANT_ANSWER = {
    *("numpy", "tyro", "tiktoken", "tiktoken_ext"),
    "huggingface_hub",  # within target.py's download: for --init_from hf:NAME alone
    "threadpoolctl",  # within machine.core_flops: for a CPU that no run has measured
    "datasets",  # within conversations.py: for --instructions hf:NAME alone
}


def module_name(path: Path) -> str:
    """Name a file the way this test does: `data.order`; the packages are `gpt2lab` and `data`."""
    parts = [part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__"]
    return ".".join(parts) or "gpt2lab"


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_in(source: str, *, for_types_alone: bool = False) -> set[str]:
    """Return the full names of all that a source imports, inside functions too: to run, or for type checkers alone."""
    tree, names = ast.parse(source), set()
    only_for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if (node in only_for_types) != for_types_alone:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own(name: str) -> str | None:
    """Return the module of this project that a full imported name means, if it is one."""
    if name.split(".")[0] != "gpt2lab":
        return None
    inside = name.removeprefix("gpt2lab").removeprefix(".")
    while inside and inside not in FILES:  # a name within the module
        inside = inside.rpartition(".")[0]
    return inside or "gpt2lab"


IMPORTS = {module: imports_in(path.read_text()) for module, path in FILES.items()}


def reached_from(module: str) -> dict[str, list[str]]:
    """Return every module of the project that importing this one may load, each with the way to it."""
    ways, waiting = {module: [module]}, [module]
    while waiting:
        here = waiting.pop()
        for name in IMPORTS[here]:
            there = own(name)
            if there is not None and there not in ways:
                ways[there] = [*ways[here], there]
                waiting.append(there)
    return ways


def third_party(module: str) -> set[str]:
    roots = {name.split(".")[0] for name in IMPORTS[module]}
    return roots - {"gpt2lab", "__future__"} - sys.stdlib_module_names


def test_the_reading_of_imports_sees_what_there_is_to_see() -> None:
    source = """
from typing import TYPE_CHECKING
import torch.nn as nn
from gpt2lab import fmt
if TYPE_CHECKING:
    from gpt2lab.model import GPT
def late():
    from gpt2lab.data.order import Order
"""
    names = imports_in(source)
    assert {own(name) for name in names} == {None, "fmt", "data.order"}
    assert "torch.nn" in names
    assert imports_in(source, for_types_alone=True) == {"gpt2lab.model.GPT"}


def test_every_module_stands_in_one_row() -> None:
    listed = sorted(itertools.chain(*ROWS))
    assert len(set(listed)) == len(listed)
    assert sorted(FILES) == listed, "give a new module its row in tests/test_layers.py"


@pytest.mark.parametrize("module", sorted(FILES))
def test_a_module_imports_only_from_rows_above_its_own(module: str) -> None:
    for name in IMPORTS[module]:
        needed = own(name)
        if needed is not None:
            assert ROW_OF[needed] < ROW_OF[module], f"{module} imports {needed}"


@pytest.mark.parametrize("module", sorted(FILES))
def test_a_module_names_no_types_from_below(module: str) -> None:
    """What only a type checker reads makes a circle too, for people."""
    for name in imports_in(FILES[module].read_text(), for_types_alone=True):
        needed = own(name)
        assert needed is None or ROW_OF[needed] < ROW_OF[module], f"{module} names {needed}"


@pytest.mark.parametrize("module", sorted({*INSTANT, *itertools.chain(*QUICK_ROWS)}))
def test_a_quick_module_never_reaches_torch_at_any_depth(module: str) -> None:
    for there, way in reached_from(module).items():
        assert not {"torch", "safetensors"} & third_party(there), " -> ".join([*way, "torch"])


@pytest.mark.parametrize("module", INSTANT)
def test_an_instant_answer_needs_few_packages(module: str) -> None:
    for there, way in reached_from(module).items():
        strangers = third_party(there) - MAY_BE_NEEDED_FOR_AN_INSTANT_ANSWER
        assert not strangers, " -> ".join([*way, *strangers])


def test_the_torch_rows_begin_where_torch_is_first_needed() -> None:
    for module in TORCH_ROWS[0]:
        assert "torch" in third_party(module)


def test_quick_modules_hide_no_import_in_a_string() -> None:
    for module in itertools.chain(*QUICK_ROWS):
        calls = {
            ast.unparse(node.func).rpartition(".")[2]
            for node in ast.walk(ast.parse(FILES[module].read_text()))
            if isinstance(node, ast.Call)
        }
        assert not {"import_module", "__import__"} & calls, module
