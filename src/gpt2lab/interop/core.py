"""CORE of DCLM (Li et al. 2024, arXiv:2406.11794): 22 tasks, with the examples and the decisions of nanochat.

Source: karpathy/nanochat, nanochat/core_eval.py and scripts/base_eval.py. No torch before a model is measured.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import itertools
import math
import random
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2lab.errors import ConfigError, DataError, GPT2LabError, first_line
from gpt2lab.evaluation.results import Results
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.files import parse_json
from gpt2lab.interop.tasks import TaskResults, keep_tasks
from gpt2lab.runs.console import counted, doing
from gpt2lab.tokenizers.interface import Tokenizer

if TYPE_CHECKING:
    from gpt2lab.distributed.strategy import Strategy
    from gpt2lab.interop.scoring import Pair
    from gpt2lab.model.gpt import GPT
    from gpt2lab.training.start import Start

_TASKS, _BASELINES = "core.yaml", "eval_meta_data.csv"
_CONTINUED = "language_modeling"
# Of each type of task: where the texts begin, and how they go on.
_FIELDS = {
    "multiple_choice": ("query", "choices"),
    "schema": ("context_options", "continuation"),
    _CONTINUED: ("context", "continuation"),
}
_ORDER_SEED, _EXAMPLES_SEED = 1337, 1234  # nanochat's
_ALL = 22  # tasks of the published bundle
_AT_MOST = 2**28  # bytes of a file, far above the published ones; a zip of 1 MB may unpack to 1 GB


@dataclass(frozen=True)
class Item:
    """The texts that are scored, and which is true; of a text to continue, without (0) and with (1) what follows."""

    texts: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class CoreTask:
    """One of the tasks; `chance` is the accuracy of guesses."""

    label: str
    type: str
    source: str  # the file of the items
    num_fewshot: int
    delimiter: str  # before what is continued
    chance: float
    items: Sequence[Item] = ()
    suffix: str = ""  # of the names of results, for a limit

    def prompts(self, number: int) -> list[str]:
        """Return the texts of an item, each after the same examples, which are drawn from the other items."""
        drawn = random.Random(_EXAMPLES_SEED + number).sample(
            range(len(self.items) - 1), self.num_fewshot
        )
        examples = [self.items[other + (other >= number)] for other in drawn]
        shown = "".join(f"{example.texts[example.gold]}\n\n" for example in examples)
        texts = [shown + text for text in self.items[number].texts]
        if self.type == _CONTINUED:  # a space at the end belongs to the next token
            texts[0] = texts[0].strip()
        return texts


def read_bundle(path: Path, limit: int | None) -> list[CoreTask]:
    """Read the published folder, or its zip; of each task the first `limit` items in nanochat's order.

    Raises: DataError naming the file, and ConfigError for a limit below the examples that a task draws.
    """
    import yaml

    if not (path.is_dir() or (path.is_file() and zipfile.is_zipfile(path))):
        raise DataError(
            f"--core {path}: no folder and no zip; give DCLM's evaluation bundle (None: no CORE)"
        )
    folder: Any = path if path.is_dir() else zipfile.Path(path)
    if (folder / "eval_bundle").is_dir():
        folder /= "eval_bundle"
    with _reading(folder / _BASELINES) as text:
        table = csv.DictReader(io.StringIO(text, newline=""))
        chance = {row["Eval Task"]: 0.01 * float(row["Random baseline"]) for row in table}
    with _reading(folder / _TASKS) as text:
        tasks = [
            CoreTask(
                label=_text(row["label"]),
                type=_text(row["icl_task_type"]),
                source=_text(row["dataset_uri"]),
                num_fewshot=int(row["num_fewshot"][0]),
                delimiter=_text(row.get("continuation_delimiter", " ")),
                chance=chance.get(row["label"], math.nan),
            )
            for row in yaml.safe_load(text)["icl_tasks"]
        ]
        if not tasks or len({task.label for task in tasks}) < len(tasks):
            raise ValueError("no task, or two of one label")
        for task in tasks:
            if task.type not in _FIELDS:
                known = ", ".join(_FIELDS)
                raise ValueError(f"{task.label} has the type {task.type!r}; known: {known}")
            if not 0 <= task.chance < 1 or task.num_fewshot < 0:
                raise ValueError(f"{task.label} has no random baseline in {_BASELINES}, or shots")
    return [_with_items(task, folder / "eval_data" / task.source, limit) for task in tasks]


@contextlib.contextmanager
def _reading(file: Any) -> Iterator[str]:
    """Yield the text of a file in the bundle; whatever is wrong with it becomes a DataError."""
    if not file.is_file():
        raise DataError(
            f"{file}: missing; --core takes DCLM's evaluation bundle as it is published"
        )
    try:
        with file.open("rb") as stream:
            content = stream.read(_AT_MOST + 1)
        if len(content) > _AT_MOST:
            raise ValueError(f"over {_AT_MOST:,} bytes")
        yield content.decode()
    except (GPT2LabError, MemoryError):
        raise
    except Exception as error:  # of zipfile, zlib, csv, yaml, or of what a field holds
        what = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"{file}: not as in DCLM's evaluation bundle ({what})") from error


def _text(value: Any) -> str:
    """Raise TypeError if it is no text; a list of aliases in YAML may be as long as memory."""
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where a text belongs")
    return value


def _with_items(task: CoreTask, file: Any, limit: int | None) -> CoreTask:
    items = []
    with _reading(file) as text:
        for number, line in enumerate(text.split("\n"), 1):
            try:
                if line.strip():
                    items.append(_read_item(parse_json(line.strip()), task))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{file} line {number}: no item of {task.type} ({error!r})"
                ) from error
    random.Random(_ORDER_SEED).shuffle(items)
    few, shots = items[:limit], task.num_fewshot
    if len(few) <= shots:
        fix = f"give --core_limit {shots + 1} or more" if len(items) > shots else "add items"
        raise ConfigError(
            f"{file}: {task.label} draws {shots} examples from the other items, and has {len(few)}; {fix}"
        )
    return replace(task, items=few, suffix=f"-first{limit}" if len(few) < len(items) else "")


def _read_item(row: dict[str, Any], task: CoreTask) -> Item:
    """Raise ValueError, KeyError or TypeError if it is no item."""
    first, last = (row[name] for name in _FIELDS[task.type])
    starts = first if task.type == "schema" else [first]
    ends = last if task.type == "multiple_choice" else [last]
    if not isinstance(starts, list) or not isinstance(ends, list):
        raise TypeError("options that are no list")
    starts, ends = ([_text(text) for text in texts] for texts in (starts, ends))
    if task.type == _CONTINUED:
        if not last:
            raise ValueError("an empty continuation")
        start = first.strip() + task.delimiter
        return Item((start, start + last), 1)
    texts = tuple(start + task.delimiter + end for start in starts for end in ends)
    if row["gold"] not in range(len(texts)):
        raise ValueError(f"gold {row['gold']!r}")
    return Item(texts, int(row["gold"]))


def _encode(prompts: list[str], type: str, tokenizer: Tokenizer) -> list[Pair]:
    """Return the ids of each context and of what is scored after it: where the texts differ, or how they all end."""
    texts = [[tokenizer.end_of_text, *tokenizer.encode(prompt)] for prompt in prompts]
    cuts = [_shared(texts)] * len(texts)
    if type == "schema":
        ending = _shared([ids[::-1] for ids in texts])
        cuts = [max(1, len(ids) - ending) for ids in texts]
    arrays = [np.array(ids, tokenizer.dtype) for ids in texts]
    pairs: list[Pair] = [(ids[:cut], ids[cut:]) for ids, cut in zip(arrays, cuts, strict=True)]
    return pairs[1:] if type == _CONTINUED else pairs


def _shared(texts: list[list[int]]) -> int:
    """Count the ids with which all texts begin."""
    columns = enumerate(zip(*texts, strict=False))
    return next((n for n, ids in columns if len(set(ids)) > 1), min(map(len, texts)))


def _judge(item: Item, type: str, found: list[tuple[float, float, int]]) -> bool:
    """Return whether an item is right, by (log-probability, whether it is greedy, tokens) of what was scored.

    The option with the lowest mean loss is taken, of equal ones the first. One that all others begin with has no token
    of its own, hence no loss: as in nanochat, it is taken if it is the first, because no comparison with nan is true,
    and never otherwise.
    """
    if type == _CONTINUED:
        return all(is_greedy and n > 0 for _, is_greedy, n in found)
    losses = [-nats / n if n else math.nan for nats, _, n in found]
    return losses.index(min(losses)) == item.gold


def measure_core(
    tasks: list[CoreTask],
    model: GPT,
    strategy: Strategy,
    tokenizer: Tokenizer,
    interrupted: Callable[[], bool] = lambda: False,
) -> TaskResults | None:
    """Return what the tasks and their mean measure, the same on all ranks; None if `interrupted` returned True.

    Raises: NonFiniteError.
    """
    from gpt2lab.interop.scoring import score_continuations

    longest = model.config.context_length
    measured = TaskResults()
    centered: dict[str, list[np.ndarray]] = defaultdict(list)  # by the file of the items
    for task in counted(tasks, "tasks"):
        with doing(f"CORE: {task.label}"):
            by_item = [
                _encode(task.prompts(number), task.type, tokenizer)
                for number in counted(range(len(task.items)), "items")
            ]
            pairs = [pair for of_item in by_item for pair in of_item]
            answers = score_continuations(
                pairs, model, strategy, longest=longest, interrupted=interrupted
            )
        if answers is None:
            return None
        lengths = [min(len(ending), longest - 1) for _, ending in pairs]
        scored = zip(*answers.tolist(), lengths, strict=True)
        right = np.zeros(len(by_item))
        for number, own in enumerate(by_item):
            found = [*itertools.islice(scored, len(own))]
            right[number] = _judge(task.items[number], task.type, found)
        cut = sum(any(len(one) + len(two) > longest for one, two in own) for own in by_item)
        above_chance = (right - task.chance) / (1 - task.chance)
        centered[task.source].append(above_chance)
        name, facts = f"core/{task.label}{task.suffix}", (task.type, task.num_fewshot, task.items)
        units = {"name": name, "items": hashlib.sha256(repr(facts).encode()).hexdigest()}
        measured.items[name] = Results("tasks", units, {"acc": right}, {})
        measured.numbers[name] = {
            **{"task": task.label, "n": len(right), "num_fewshot": task.num_fewshot, "cut": cut},
            "metrics": {"acc": _estimate(right), "centered": _estimate(above_chance)},
        }
    total = sum(one["n"] for one in measured.numbers.values())
    _add_mean(measured, tasks, centered)
    if len(tasks) != _ALL:
        measured.warnings.append(
            f"CORE: the mean is over {len(tasks)} tasks, of {_ALL} in the published bundle: compare with means over "
            f"the same tasks only"
        )
    if cut := [*measured.numbers.values()][-1]["cut"]:
        measured.warnings.append(
            f"CORE: {cut:,} of {total:,} items have prompts over the model's context of {longest} tokens, which lose "
            f"examples on the left: compare with models of the same context only"
        )
    return measured


def _add_mean(
    measured: TaskResults, tasks: list[CoreTask], centered: dict[str, list[np.ndarray]]
) -> None:
    """Add the mean of the tasks' centred accuracies; tasks with the same items are one stratum of its error."""
    name = "core" + max((task.suffix for task in tasks), key=len)
    values = [np.mean(of_source, axis=0) for of_source in centered.values()]
    shares = [len(of_source) / len(tasks) for of_source in centered.values()]
    weights = [np.full(len(v), share / len(v)) for v, share in zip(values, shares, strict=True)]
    items = [results.units["items"] for results in measured.items.values()]
    measured.items[name] = mean = Results(
        "tasks",
        {
            **{"name": name, "weights": shares},
            "items": hashlib.sha256(repr(items).encode()).hexdigest(),
        },
        {"centered": np.concatenate(values)},
        {},
        weights=np.concatenate(weights),
    )
    cut = sum(one["cut"] for one in measured.numbers.values())
    measured.numbers[name] = {
        **{"task": "core", "n": mean.n, "num_fewshot": None, "cut": cut},
        "metrics": {"centered": _estimate(mean.per_unit["centered"], mean.weights, mean.strata)},
    }


def _estimate(*values: Any) -> dict[str, float | None]:
    found = estimate_mean(*values)
    return {"value": found.mean, "se": found.se}


@dataclass(frozen=True)
class CoreOfRun:
    """CORE as a run is scored on it while it trains."""

    tasks: list[CoreTask]
    tokenizer: Tokenizer
    run_dir: Path

    def measure(
        self, model: GPT, strategy: Strategy, *, step: int, interrupted: Callable[[], bool]
    ) -> tuple[dict[str, Any], str | None] | None:
        """See `Benchmark` in training/start.py."""
        found = measure_core(self.tasks, model, strategy, self.tokenizer, interrupted)
        if found is None:
            return None
        problem = keep_tasks(found, self.run_dir, step) if strategy.runtime.rank == 0 else None
        mean = [*found.numbers.values()][-1]
        centered = mean["metrics"]["centered"]
        numbers = {"tasks": len(self.tasks), "n": mean["n"], "cut": mean["cut"]}
        return {"centered": centered["value"], "centered_se": centered["se"], **numbers}, problem


def open_core(start: Start) -> CoreOfRun | None:
    """Read the bundle that a run is scored on; None if there is none, or nothing is left to train.

    Raises: ConfigError, DataError.
    """
    of_run = start.config.eval
    idle = [
        name
        for name in ("core_freq", "core_limit")
        if name in start.chosen and getattr(of_run, name)
    ]
    if of_run.core is None and idle and "core" not in start.chosen:
        raise ConfigError(f"--{idle[0]} is for --core; give the bundle too")
    if of_run.core is None or start.is_complete:
        return None
    if start.tokenizer is None:
        raise ConfigError(f"--core {of_run.core}: {start.no_text}: CORE cannot be measured")
    return CoreOfRun(read_bundle(of_run.core, of_run.core_limit), start.tokenizer, start.run_dir)
