"""A tiny corpus with awkward shard sizes, self-made HellaSwag items, and the flags of a run of four steps over both."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2lab.commands import command_line
from gpt2lab.config.request import RunRequest
from gpt2lab.config.schema import Config, RecipeName
from gpt2lab.config.settings import to_flat
from gpt2lab.runs.target import find_target
from gpt2lab.training.recipe import PRETRAINING, Recipe
from gpt2lab.training.resolve import resolve
from gpt2lab.training.start import Start

if TYPE_CHECKING:
    from gpt2lab.evaluation.validation import ValidationLoss

VOCAB = 256
CONTEXT = 16
TRAIN_SHARDS = (1003, 777, 1290)  # none a multiple of T + 1, so every shard end is awkward
VAL_SHARDS = (650,)


# A model and a step that take milliseconds; what is typed after them wins.
TINY = (
    *("--n_layer=2", "--n_head=2", "--n_embd=32", f"--context_length={CONTEXT}"),
    *(f"--vocab_size={VOCAB}", "--total_batch_size=128", "--mini_batch_size=2"),
    *("--device=cpu", "--dtype=fp32", "--compile=off", "--val_tokens=320"),
)
# The same and smaller, with GPT-2's vocabulary: its samples are text.
TEXT = (
    *(word for word in TINY if "vocab_size" not in word),
    *("--n_layer=1", "--n_embd=16", "--total_batch_size=64"),
)
# The four changes of the modern models to GPT-2's network.
MODERN: dict[str, Any] = {
    **{"positions": "rotary", "norm": "rmsnorm", "qk_norm": "rmsnorm", "activation": "relu2"}
}


def flags_for(**settings: object) -> list[str]:
    """Return settings as flags: `max_steps=5` is --max_steps=5, True a flag alone, a list one of several words."""
    words: list[str] = []
    for name, value in settings.items():
        if isinstance(value, list | tuple):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}" if value is True else f"--{name}={value}")
    return words


def make_tokens(count: int, seed: int) -> np.ndarray:
    """Return ids with something to learn: each is often the one before plus a constant."""
    rng = np.random.RandomState(seed)
    jumps = np.where(rng.rand(count) < 0.8, 3, rng.randint(0, VOCAB, count))
    return (np.cumsum(jumps) % VOCAB).astype(np.uint16)


def write_shards(folder: Path, *, train: tuple[int, ...], val: tuple[int, ...]) -> Path:
    """Write foreign shards (no shards.json) of the given lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, sizes in (("train", train), ("val", val)):
        for index, size in enumerate(sizes):
            tokens = make_tokens(size, seed=1000 * len(split) + index)
            np.save(folder / f"tiny_{split}_{index:06d}.npy", tokens)
    return folder


def draw_losses(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean losses and targets of documents: lengths as different as those of source files."""
    tokens = np.maximum(1, rng.lognormal(6, 1.2, count))
    windows = np.maximum(1, tokens // 256)
    return rng.normal(0, 0.3, count) + rng.normal(0, 0.4, count) / np.sqrt(windows), tokens


def flip_bit(path: Path, at: int = -1) -> None:
    """Flip the lowest bit of a file's byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def edit_json(path: Path, **values: Any) -> None:
    """Change values of the JSON object in a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


_VERBS = ("opens", "paints", "drops", "lifts", "cleans", "forgets")


def write_items(path: Path, count: int = 12) -> Path:
    """Write self-made items in HellaSwag's format."""
    rng = np.random.RandomState(0)
    rows = []
    for index in range(count):
        nouns = [f"box {number}" for number in rng.randint(0, 99, 5)]
        parts = (f"{_VERBS[(index + k) % 6]} the {nouns[k]} [step] slowly" for k in range(4))
        endings = [part * (k + 1) for k, part in enumerate(parts)]
        rows.append(
            {
                "ind": index,
                "activity_label": "Moving house",
                "ctx_a": f"A man carries a {nouns[4]}.",
                "ctx_b": "he then",
                "ctx": f"A man carries a {nouns[4]}. he then",
                "endings": endings,
                "label": int(rng.randint(4)),
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_inputs(folder: Path, *, train: int = 2000, items: int = 12) -> Path:
    """Write the data and the items that `flags_of` names."""
    write_shards(folder / "data", train=(train,), val=(650,))
    write_items(folder / "items.jsonl", items)
    return folder


def flags_of(folder: Path, name: str, *more: str) -> list[str]:
    """Return the command line of a run over `folder`'s data and items, with GPT-2's vocabulary."""
    return [
        *(*TEXT, f"--data_dir={folder / 'data'}", f"--checkpoint_dir={folder / 'runs'}"),
        *("--max_steps=4", "--eval_freq=2", "--max_lr=0.01"),
        *(f"--hellaswag_path={folder / 'items.jsonl'}", "--hellaswag_freq=2", "--sample_tokens=2"),
        *(f"--run_name={name}", *more),
    ]


def parse(argv: Sequence[str], recipe: RecipeName = "pretrain") -> RunRequest:
    """Return what a command line of the trainer asks for."""
    return command_line.parse(list(argv), recipe).request


def fresh(*argv: str) -> dict[str, Any]:
    """Return the settings of a fresh run as they are written down."""
    return to_flat(parse(argv).config)


def pretrain(
    request: RunRequest,
    *,
    recipe: Recipe = PRETRAINING,
    actions: command_line.Actions | None = None,
) -> None:
    """Train in this process with all that surrounds a run, as far as it is there."""
    from gpt2lab.training.pretrain import pretrain as train

    if importlib.util.find_spec("gpt2lab.planner") is None:  # the core alone
        return train(request, recipe=recipe)
    from gpt2lab.commands.train import extensions, planner_of
    from gpt2lab.interop.core import open_core

    around = {"extensions": extensions(), "open_core": open_core}
    planner = planner_of(actions or command_line.Actions())
    return train(request, recipe=recipe, planner=planner, **around)


def train(argv: Sequence[str]) -> None:
    """Train as a command line says, with --preset and --fit_schedule too."""
    arguments = command_line.parse(list(argv))
    pretrain(arguments.request, actions=arguments.actions)


def resolved(argv: Sequence[str], *, world_size: int = 1) -> Start:
    """Return what a command line would start, with --preset too."""
    arguments = command_line.parse(list(argv))
    how: dict[str, Any] = {"world_size": world_size, "set_aside": False}
    if importlib.util.find_spec("gpt2lab.planner") is not None:  # else the core alone
        from gpt2lab.commands.train import planner_of

        how["planner"] = planner_of(arguments.actions)
    return resolve(arguments.request, **how)


def evaluated(name: str, checkpoint_dir: Path, **what: Any) -> "ValidationLoss":
    """Return the validation loss of a run's newest weights, or of other weights, on the CPU."""
    from gpt2lab.distributed.runtime import Runtime
    from gpt2lab.evaluation import request as evaluation

    target, runtime = find_target(name, checkpoint_dir), Runtime()
    request = evaluation.EvaluationRequest(name, checkpoint_dir, device="cpu", **what)
    settings = target.checkpoint.config() if target.checkpoint else Config()
    subject = evaluation.load_subject(request, target, settings, runtime)
    return evaluation.measure_loss(subject, evaluation.open_shards(subject)[1])
