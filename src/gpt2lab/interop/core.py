"""CORE of DCLM (Li et al. 2024, arXiv:2406.11794): 22 tasks, with the examples and the decisions of nanochat.

Source: karpathy/nanochat, nanochat/core_eval.py and scripts/base_eval.py. No torch before a model is measured.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import random
import zipfile
import zlib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2lab.errors import ConfigError, DataError, first_line
from gpt2lab.evaluation.results import Results
from gpt2lab.evaluation.uncertainty import estimate_mean
from gpt2lab.files import parse_json, wrong_kind
from gpt2lab.interop.tasks import TaskResults
from gpt2lab.runs.console import counted, doing
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.tokenizers.opening import why_no_text

if TYPE_CHECKING:
    from gpt2lab.distributed.runtime import Runtime
    from gpt2lab.distributed.strategy import Strategy
    from gpt2lab.model.gpt import GPT
    from gpt2lab.runs.target import Target

_TASKS, _BASELINES = "core.yaml", "eval_meta_data.csv"
_CONTINUED = "language_modeling"
# Of each type of task: where the texts begin, and how they go on.
_FIELDS = {
    "multiple_choice": ("query", "choices"),
    "schema": ("context_options", "continuation"),
    _CONTINUED: ("context", "continuation"),
}
_ORDER_SEED, _EXAMPLES_SEED = 1337, 1234  # nanochat's


@dataclass(frozen=True)
class Item:
    """The texts that are scored, and which is true; of a text to continue, without (0) and with (1) what follows."""

    texts: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class CoreTask:
    """One of the tasks; `baseline` is the accuracy of guesses."""

    label: str
    type: str
    source: str  # the file of the items
    num_fewshot: int
    baseline: float
    size: int  # of the file
    items: list[Item]

    @property
    def suffix(self) -> str:
        """Return what the names of results say of a limit."""
        return f"-first{len(self.items)}" if len(self.items) < self.size else ""

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
    folder = _find(path)
    baselines = _baselines(folder / _BASELINES)
    rows = _parsed(folder / _TASKS)
    tasks = [_read_task(folder, row, baselines, limit) for row in rows]
    if not tasks or len({task.label for task in tasks}) < len(tasks):
        raise DataError(f"{folder / _TASKS}: has no tasks, or two of one label")
    return tasks


def _find(path: Path) -> Any:
    """Return the folder with the list of tasks, as a Path or a zipfile.Path."""
    problem = "no such file or folder" if not path.exists() else None
    if problem is None and not path.is_dir():
        problem = wrong_kind(path, follow=True)
        if problem is None and not zipfile.is_zipfile(path):
            problem = "neither a folder nor a zip"
    if problem is not None:
        raise DataError(f"--core {path}: {problem}; give DCLM's evaluation bundle")
    root: Any = path if path.is_dir() else zipfile.Path(path)
    for folder in (root, root / "eval_bundle"):
        if (folder / _TASKS).is_file():
            return folder
    raise DataError(f"--core {path}: holds no {_TASKS}; give DCLM's evaluation bundle")


def _text(file: Any) -> str:
    try:
        if not file.is_file():
            raise DataError(f"{file}: missing in the bundle; unpack the published one again")
        return str(file.read_bytes().decode())
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{file}: cannot be read ({first_line(error)})") from error


def _parsed(file: Any) -> list[Any]:
    import yaml

    try:
        return list(yaml.safe_load(_text(file))["icl_tasks"])
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise DataError(f"{file}: not a list of tasks ({first_line(error)})") from error


def _baselines(file: Any) -> dict[str, float]:
    """Return the accuracy of guesses of each task, as a share."""
    try:
        rows = csv.DictReader(io.StringIO(_text(file), newline=""))
        return {row["Eval Task"]: 0.01 * float(row["Random baseline"]) for row in rows}
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{file}: not a table of random baselines ({first_line(error)})") from error


def _read_task(folder: Any, row: Any, baselines: dict[str, float], limit: int | None) -> CoreTask:
    try:
        label, type, source = (str(row[key]) for key in ("label", "icl_task_type", "dataset_uri"))
        num_fewshot, delimiter = int(row["num_fewshot"][0]), row.get("continuation_delimiter", " ")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / _TASKS}: {row!r:.60} is no task ({error!r})") from error
    if type not in _FIELDS:
        known = ", ".join(_FIELDS)
        raise DataError(f"{folder / _TASKS}: {label}: type {type!r} is not known; known: {known}")
    if not 0 <= baselines.get(label, -1) < 1:
        raise DataError(f"{folder / _BASELINES}: no random baseline from 0 to 99 % for {label}")
    file = folder / "eval_data" / source
    items = []
    for number, line in enumerate(_text(file).split("\n"), 1):
        try:
            if line.strip():
                items.append(_read_item(parse_json(line.strip()), type, delimiter))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file} line {number}: no item of {type} ({error!r})") from error
    size = len(items)
    random.Random(_ORDER_SEED).shuffle(items)
    items = items[:limit]
    if len(items) <= num_fewshot:
        fix = f"give --core_limit {num_fewshot + 1} or more" if size > num_fewshot else "add items"
        raise ConfigError(
            f"{file}: {label} draws {num_fewshot} examples from the other items, and has {len(items)}; {fix}"
        )
    return CoreTask(label, type, source, num_fewshot, baselines[label], size, items)


def _read_item(row: dict[str, Any], type: str, delimiter: str) -> Item:
    """Raise ValueError, KeyError or TypeError if it is no item."""
    first, last = (row[name] for name in _FIELDS[type])
    starts = first if type == "schema" else [first]
    ends = last if type == "multiple_choice" else [last]
    if not all(isinstance(text, str) for text in (*starts, *ends)):
        raise ValueError("not a text")
    if type == _CONTINUED:
        if not last:
            raise ValueError("an empty continuation")
        start = first.strip() + delimiter
        return Item((start, start + last), 1)
    texts = tuple(start + delimiter + end for start in starts for end in ends)
    gold = row["gold"]
    if gold not in range(len(texts)):
        raise ValueError(f"gold {gold!r}")
    return Item(texts, int(gold))


def _encode(prompts: list[str], type: str, tokenizer: Tokenizer) -> list[list[np.ndarray]]:
    """Return the ids of each context and of what is scored after it: where the texts differ, or how they all end."""
    texts = [[tokenizer.end_of_text, *tokenizer.encode(prompt)] for prompt in prompts]
    arrays = [np.array(ids, tokenizer.dtype) for ids in texts]
    if type == "schema":
        ending = _shared([ids[::-1] for ids in texts])
        return [np.split(ids, [max(1, len(ids) - ending)]) for ids in arrays]
    cut = _shared(texts)
    own = [ids[cut:] for ids in arrays]
    return [[arrays[0][:cut], *(own[1:] if type == _CONTINUED else own)]]


def _shared(texts: list[list[int]]) -> int:
    """Count the ids with which all texts begin."""
    columns = enumerate(zip(*texts, strict=False))
    return next((n for n, ids in columns if len(set(ids)) > 1), min(map(len, texts)))


def _choose(nats: list[float], lengths: list[int]) -> int:
    """Return the option with the lowest mean loss, of equal ones the first.

    An option that all others begin with has no token of its own, hence no loss. As in nanochat, it is taken if it is
    the first, because no comparison with nan is true, and never otherwise.
    """
    losses = [-value / n if n else math.nan for value, n in zip(nats, lengths, strict=True)]
    return losses.index(min(losses))


def measure_core(
    tasks: list[CoreTask], target: Target, model: GPT, *, strategy: Strategy, runtime: Runtime
) -> TaskResults:
    """Return what the tasks and their mean measure, the same on all ranks.

    Raises: ConfigError if the weights' ids mean no text; DataError; NonFiniteError.
    """
    from gpt2lab.interop.scoring import score_continuations

    tokenizer, longest = target.tokenizer(), model.config.context_length
    problem = why_no_text(tokenizer, model.config.vocab_size)
    if tokenizer is None or problem is not None:
        raise ConfigError(f"{target.name}: {problem}: CORE cannot be measured")
    measured, of_all = TaskResults(), hashlib.sha256()
    centered: dict[str, list[np.ndarray]] = defaultdict(list)  # by the file of the items
    for task in tasks:
        digest, sequences, lengths, ends, cut = hashlib.sha256(), [], [], [0], 0
        with doing(f"CORE: {task.label}"):
            for number, item in enumerate(counted(task.items, "items")):
                prompts = task.prompts(number)
                digest.update(repr((prompts, item.gold)).encode())
                encoded = _encode(prompts, task.type, tokenizer)
                endings = [len(ending) for _, *endings in encoded for ending in endings]
                sequences += encoded
                lengths += [min(length, longest - 1) for length in endings]
                ends.append(len(lengths))
                cut += any(len(c) + max(map(len, endings)) > longest for c, *endings in encoded)
            nats, is_greedy = score_continuations(
                sequences,
                model,
                longest=longest,
                strategy=strategy,
                runtime=runtime,
                name=target.name,
            )
        right = np.zeros(len(task.items))
        for number, (item, of_item) in enumerate(
            zip(task.items, map(slice, ends, ends[1:]), strict=True)
        ):
            if task.type == _CONTINUED:
                right[number] = is_greedy[number] and lengths[number] > 0
            else:
                right[number] = _choose(nats[of_item].tolist(), lengths[of_item]) == item.gold
        above_chance = (right - task.baseline) / (1 - task.baseline)
        centered[task.source].append(above_chance)
        name, items = f"core/{task.label}{task.suffix}", digest.hexdigest()
        of_all.update(items.encode())
        measured.items[name] = Results("tasks", {"name": name, "items": items}, {"acc": right}, {})
        measured.numbers[name] = {
            **{"task": task.label, "n": len(right), "num_fewshot": task.num_fewshot, "cut": cut},
            "metrics": {"acc": _estimate(right), "centered": _estimate(above_chance)},
        }
    # Tasks with the same items are one stratum of the mean.
    values = [np.mean(of_source, axis=0) for of_source in centered.values()]
    shares = [len(of_source) / len(tasks) for of_source in centered.values()]
    weights = [np.full(len(v), share / len(v)) for v, share in zip(values, shares, strict=True)]
    name = "core" + max((task.suffix for task in tasks), key=len)
    measured.items[name] = results = Results(
        "tasks",
        {"name": name, "items": of_all.hexdigest(), "weights": shares},
        {"centered": np.concatenate(values)},
        {},
        weights=np.concatenate(weights),
    )
    mean = _estimate(results.per_unit["centered"], results.weights, results.strata)
    cut = sum(numbers["cut"] for numbers in measured.numbers.values())
    measured.numbers[name] = {
        **{"task": "core", "n": results.n, "num_fewshot": None, "cut": cut},
        "metrics": {"centered": mean},
    }
    if cut:
        measured.warnings.append(
            f"CORE: {cut:,} of {sum(len(task.items) for task in tasks):,} items are longer than the model's context of "
            f"{longest} tokens and lost examples: compare with models of the same context only"
        )
    return measured


def _estimate(*values: Any) -> dict[str, float | None]:
    found = estimate_mean(*values)
    return {"value": found.mean, "se": found.se}
