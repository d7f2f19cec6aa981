"""nanoGPT's settings as ours: what a run that continues from its file takes over, and what it cannot. No torch.

Source: train.py of nanoGPT, which saves its `config` in ckpt.pt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpt2lab.errors import raise_problems


@dataclass(frozen=True)
class Entry:
    """One line of the table: what nanoGPT had, our settings in its place, and why they are not the same."""

    theirs: str
    settings: dict[str, Any] = field(default_factory=dict)
    here: str = ""  # if it is not a setting
    why: str = ""


_KINDS: dict[str, type] = {
    **dict.fromkeys(("batch_size", "gradient_accumulation_steps", "eval_iters"), int),
    **dict.fromkeys(("eval_interval", "log_interval"), int),
    **dict.fromkeys(("max_iters", "lr_decay_iters", "warmup_iters"), int),
    **dict.fromkeys(("learning_rate", "min_lr", "weight_decay"), float),
    **dict.fromkeys(("beta1", "beta2", "grad_clip", "dropout"), float),
    **dict.fromkeys(("dtype", "device", "dataset"), str),
    "decay_lr": bool,
}
_SAME = {name: name for name in ("weight_decay", "beta1", "beta2", "grad_clip", "dropout")} | {
    "log_interval": "log_freq"
}


def entries_of(config: Mapping[str, Any], *, block_size: int, done: int) -> list[Entry]:
    """Return what a run takes over from the settings in a ckpt.pt after `done` updates.

    A setting of ours is taken where the file has all that it follows from.

    Raises: ConfigError naming every setting whose value is of another kind.
    """
    known = {name: config[name] for name in _KINDS if name in config}
    wrong = [
        f"{name} {value!r:.40} in its config is not of type {_KINDS[name].__name__}"
        for name, value in known.items()
        if type(value) is not _KINDS[name] and not (_KINDS[name] is float and type(value) is int)
    ]
    raise_problems(wrong)
    entries: list[Entry] = []

    def take(names: str, entry: Callable[..., Entry | list[Entry]]) -> None:
        wanted = names.split()
        if all(name in known for name in wanted):
            made = entry(*(known[name] for name in wanted))
            entries.extend(made if isinstance(made, list) else [made])

    take(
        "batch_size gradient_accumulation_steps",
        lambda batch, accumulation: Entry(
            f"batch_size {batch} x gradient_accumulation_steps {accumulation} x block_size {block_size}",
            {"total_batch_size": batch * accumulation * block_size},
        ),
    )
    take("batch_size", lambda batch: Entry(f"batch_size {batch}", {"mini_batch_size": batch}))
    schedule = "learning_rate min_lr decay_lr warmup_iters lr_decay_iters max_iters"
    take(schedule, lambda *values: _schedule(*values, done=done))
    for theirs, ours in _SAME.items():
        take(theirs, lambda value, t=theirs, o=ours: Entry(f"{t} {value}", {o: value}))
    take(
        "eval_interval",
        lambda steps: Entry(
            f"eval_interval {steps}", {"eval_freq": steps, "checkpoint_freq": steps}
        ),
    )
    take(
        "eval_iters batch_size",
        lambda iters, batch: Entry(
            f"eval_iters {iters} x batch_size x block_size",
            {"val_tokens": iters * batch * block_size},
            why="the same windows at every evaluation, not random ones",
        ),
    )
    take("dtype device", _precision)
    return entries


def _schedule(
    rate: float, floor: float, decays: bool, warmup: int, decay_steps: int, last: int, *, done: int
) -> list[Entry]:
    """Return the same rate for every step to come.

    nanoGPT counts updates from 0, warms up to `warmup_iters` + 1, decays to `lr_decay_iters`, holds min_lr from there
    on, and ends after update `max_iters` + 1. Ours ends where the decay does.
    """
    if decays and done < warmup and decay_steps < warmup:
        return _only_warmup(rate, floor, warmup, decay_steps, last)
    if not decays or done > decay_steps:
        held = rate if not decays else floor
        theirs = "decay_lr False" if not decays else f"min_lr {floor} after lr_decay_iters"
        return [
            Entry(
                f"{theirs}: a constant rate", {"max_lr": held, "min_lr": held, "warmup_steps": 0}
            ),
            Entry(f"max_iters {last}", {"max_steps": last + 1}, why="nanoGPT takes one more step"),
        ]
    why = "nanoGPT takes one more step"
    if last < decay_steps:
        why = f"the end of the decay; nanoGPT stops before: --stop_after_steps {last + 1}"
    if last > decay_steps:
        why = "the end of the decay; nanoGPT continues at min_lr"
    return [
        Entry(f"learning_rate {rate}", {"max_lr": rate}),
        Entry(f"min_lr {floor}", {"min_lr": floor}),
        Entry(f"warmup_iters {warmup}", {"warmup_steps": warmup + 1}, why="the same rates"),
        Entry(
            f"lr_decay_iters {decay_steps}, max_iters {last}",
            {"lr_schedule": "cosine", "max_steps": decay_steps + 1},
            why=why,
        ),
    ]


def _only_warmup(
    rate: float, floor: float, warmup: int, decay_steps: int, last: int
) -> list[Entry]:
    """Return the rates of a warm-up that is not over when the decay is: a line up to its last update."""
    steps = min(warmup, last + 1)
    peak = rate * steps / (warmup + 1)
    why = "nanoGPT only warms up" if last < warmup else "the warm-up; nanoGPT continues at min_lr"
    return [
        Entry(
            f"learning_rate {rate}, warmup_iters {warmup}",
            {"max_lr": peak, "warmup_steps": steps},
            why="the same rates, as far as it goes",
        ),
        Entry(f"min_lr {floor}", {"min_lr": min(floor, peak)}, why="not reached"),
        Entry(f"lr_decay_iters {decay_steps}, max_iters {last}", {"max_steps": steps}, why=why),
    ]


def _precision(dtype: str, device: str) -> Entry:
    ours = {"float32": "fp32", "float16": "fp16"}.get(dtype, "auto")
    # nanoGPT uses autocast on a GPU of CUDA alone.
    return Entry(f"dtype {dtype} on {device}", {"dtype": ours if "cuda" in device else "fp32"})


def differences(*, has_biases: bool, rows: int, ids: int) -> list[Entry]:
    """Return how a model and its data differ from nanoGPT's beside the settings.

    `rows`: of the embedding in the file; `ids`: of the tokenizer, which take part in the softmax here.
    """
    found = [
        Entry(
            "windows drawn at random",
            {"shuffle": "windows"},
            why="every window once an epoch; data begins at sample 0, because the file does not record its windows",
        ),
        Entry("exact GELU", here="tanh GELU", why="GPT-2's form: the loss moves a little at first"),
    ]
    if not has_biases:
        why = "they compute the same, and are trained from here on"
        found.append(Entry("trained without biases", here="biases of zero", why=why))
    if ids < rows:
        theirs, here = f"softmax over {rows:,} rows", f"over the {ids:,} ids of text"
        found.append(Entry(theirs, here=here, why="the other rows are padding"))
    return found
