"""Replay steps of a run from one of its checkpoints: unchanged, or with one thing changed.

A step is the trainer's own, on the components that a resume builds. It reads the samples that the log says it consumed,
so a run that was rewound replays as it went. There is no logger, saver or lock: nothing is written to the run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpt2lab import fmt, paths
from gpt2lab.checkpoint.catalog import CheckpointInfo
from gpt2lab.config.request import RunRequest, chosen_in, follow_peak
from gpt2lab.config.settings import LEAVES, find_problems, override, policy_of, to_flat
from gpt2lab.data.loader import GlobalBatch
from gpt2lab.distributed.compilation import missing_for_compile
from gpt2lab.distributed.runtime import Runtime, resolve_dtype
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import CheckpointError, ConfigError, raise_problems
from gpt2lab.lab.step_tokens import Documents, RecordedRun, find_documents
from gpt2lab.model import rng
from gpt2lab.runs import history
from gpt2lab.runs.console import counted, doing, say
from gpt2lab.runs.events import Event, finite
from gpt2lab.training.components import Components
from gpt2lab.training.device import check_kernels, choose_hardware
from gpt2lab.training.pretrain import build
from gpt2lab.training.resolve import resolve
from gpt2lab.training.steps import launch_step, state_after
from gpt2lab.training.train_step import train_step

# What is compared of a step, in the order of cause and effect: name, field of the event.
QUANTITIES = (
    ("batch", "batch_hash"),
    ("learning rate", "lr"),
    ("loss", "loss"),
    ("gradient norm", "grad_norm"),
    ("update", "updated"),
)
# Relative tolerance where sums have another order: several ranks, or a compiled run that is replayed uncompiled.
ROUNDING = {"loss": 1e-5, "grad_norm": 1e-4}
_LOCATION = {"run_name", "checkpoint_dir"}


@dataclass(frozen=True)
class Change:
    """The one thing that a replay changes; by default nothing.

    Samples and documents are left out of the loss: their targets are masked, and the loss is the mean over the others.
    Their tokens remain context of other targets.
    """

    without_samples: frozenset[int] = frozenset()
    without_documents: frozenset[int] = frozenset()
    # The peak learning rate or the dtype, by the name of its flag.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def describe(self) -> str | None:
        """Return the change in words; None if nothing is changed.

        Raises: ConfigError if it is more than one thing.
        """
        numbers = (("sample", self.without_samples), ("document", self.without_documents))
        said = [
            f"without {noun}{'s' if len(found) > 1 else ''} {', '.join(f'{n:,}' for n in sorted(found))}"
            for noun, found in numbers
            if found
        ]
        for name, value in self.settings.items():
            said.append(f"with {name} {f'{value:g}' if isinstance(value, float) else value}")
        if len(said) > 1:
            raise ConfigError(f"{' and '.join(said)}: change one thing at a time")
        return said[0] if said else None


UNCHANGED = Change()


@dataclass(frozen=True)
class ReplayedStep:
    """A replayed step."""

    # `step` and QUANTITIES, by the names of the log; a non-finite number is None.
    event: Event
    logged: Event
    num_targets: int
    # L2 norm of the gradient of each layer before clipping, if asked for; None: not finite.
    layers: dict[str, float | None]


@dataclass(frozen=True)
class Departure:
    """The first replayed step that is not as logged."""

    step: int
    quantity: str  # a name of QUANTITIES
    logged: Any
    replayed: Any


def first_difference(
    a: Event, b: Event, *, tolerance: dict[str, float] | None = None
) -> tuple[str, str] | None:
    """Return the first of QUANTITIES in which two events of a step differ, (name, field); None if none does.

    `tolerance`: relative, by field; by default values must be equal.
    """
    for name, field in QUANTITIES:
        x, y = a.get(field), b.get(field)
        is_same = x == y
        if isinstance(x, float) and isinstance(y, float):
            is_same = math.isclose(x, y, rel_tol=(tolerance or {}).get(field, 0.0))
        if not is_same:
            return name, field
    return None


def other_values(before: dict[str, Any], now: dict[str, Any], link: str = "->") -> list[str]:
    """Return a line for each value that differs, `threads 1 -> 2`, in the order of `before`."""
    return [
        f"{name} {before.get(name)} {link} {now.get(name)}"
        for name in before | now
        if before.get(name) != now.get(name)
    ]


def open_replay(run: RecordedRun, *, first: int, last: int) -> Replay:
    """Load the newest intact checkpoint before step `first`, to replay steps up to `last`.

    Raises: ConfigError if there is none, or a step was not trained; CheckpointError, DataError.
    """
    if "RANK" in os.environ:
        raise ConfigError("a replay is one process; start it without torchrun")
    numbers = run.log.numbers
    if not len(numbers):
        raise ConfigError(f"{run.name}: has trained no step")
    if first < 1 or last < first or not {first, last} <= set(numbers.tolist()):
        asked, taken = fmt.steps(first, last), fmt.steps(numbers[0], numbers[-1])
        raise ConfigError(f"{run.name}: no {asked}; it has {taken}")
    notes: list[str] = []
    for step in sorted((step for step in run.checkpoints if step < first), reverse=True):
        try:
            with doing(f"loading the checkpoint of step {step}"):
                replay = _open(run, run.checkpoints[step], first=first, last=last)
        except CheckpointError as error:
            notes.append(f"skipped: {error}")
        else:
            say(
                f"replaying {fmt.number_of(last - step, 'step')} from the checkpoint of step {step}"
            )
            replay.notes = tuple(notes)
            return replay
    if notes:
        raise CheckpointError(f"no intact checkpoint before step {first}; {notes[0]}")
    left = "no step can be replayed; a run keeps more with --keep_checkpoints"
    if (oldest := min(run.checkpoints, default=numbers[-1])) < numbers[-1]:
        left = f"steps from {oldest + 1} on can be replayed"
    raise ConfigError(f"{run.name}: no checkpoint before step {first}; {left}")


def _open(run: RecordedRun, info: CheckpointInfo, *, first: int, last: int) -> Replay:
    logged = {number: run.log.step(number) for number in range(info.step + 1, last + 1)}
    if missing := [number for number, event in logged.items() if event is None]:
        raise ConfigError(f"{run.name}: step {missing[0]} is not in its log")
    events = {number: event for number, event in logged.items() if event is not None}
    _require_one_setting(run, events, first=first)
    attempt = events[info.step + 1]["attempt"]
    record = run.record(attempt)
    values = _settings_then(run, attempt, info)
    config = run.with_data(override(info.config(), values))
    if run.data_dir:
        data = run.recipe.open_data(config, history.read_tokenizer(run.folder))
        trained_on = record.get("data_fingerprint") or info.manifest["data_fingerprint"]
        run.require_same_data(data, trained_on)
        values["data_dir"] = config.data.data_dir
    saved_on = record.get("environment") or info.manifest["environment"]
    runtime, rounding = Runtime(), None
    runtime.use(config.system)
    if saved_on.get("world_size", 1) > 1 and config.system.reduce != "exact":
        rounding = "the ranks of the run summed in another order than one process does"
    lacks = missing_for_compile(runtime.device) if config.system.compile == "on" else None
    if lacks:
        values["compile"] = "off"
        rounding = f"the run was compiled, and nothing can compile here ({lacks})"
    if isinstance(threads := saved_on.get("threads"), int) and threads > 0:
        torch.set_num_threads(threads)  # sums depend on it
    request = RunRequest(
        config=override(info.config(), {"run_name": None}),
        recipe="pretrain" if info.config().tuning.instructions is None else "finetune",
        resume=str(info.path),
        allowed_changes=frozenset({*LEAVES, "data"}),
    ).with_settings(**values)
    # From here on as the trainer resumes.
    resolved = resolve(request, run.recipe, world_size=1, set_aside=False)
    start = choose_hardware(resolved, runtime)
    model = run.recipe.build_model(start, runtime)
    start = check_kernels(start, model, runtime)
    components = build(start, runtime, model, run.recipe, against_log="skip")
    return Replay(components, events, saved_on=saved_on, rounding=rounding)


def _settings_then(run: RecordedRun, attempt: int, info: CheckpointInfo) -> dict[str, Any]:
    """Return the settings of a start of a run that must be chosen again when its checkpoint is resumed."""
    saved, wanted = to_flat(info.config()), run.settings(attempt)
    # The optimizer's settings go together: another one needs its own rate.
    names = {n for n, v in wanted.items() if saved[n] != v or LEAVES[n][0] == "optim"} - _LOCATION
    if "min_lr" not in chosen_in(info.manifest["config"]) | chosen_in(wanted):
        names.remove("min_lr")  # it follows the peak
    values = {name: wanted[name] for name in names}
    if begin := run.log.begin_of(attempt):
        # With epochs or tokens, other data would mean another length.
        values["max_steps"] = begin["max_steps"]
    return values | dict.fromkeys(("checkpoint_mirror", "hellaswag_path", "core"))


def _require_one_setting(run: RecordedRun, events: dict[int, Event], *, first: int) -> None:
    """Reject a range of steps within which a resume changed settings that training depends on."""
    by_attempt = {event["attempt"]: event for event in run.log.of_kind("resume")}
    attempts = [event["attempt"] for event in events.values()]
    for attempt in range(attempts[0] + 1, attempts[-1] + 1):
        resume = by_attempt.get(attempt, {"changes": {}, "step": 0})
        changed = [
            n for n in resume["changes"] if n == "data" or policy_of(n, run.config) == "guarded"
        ]
        if changed and attempt in attempts:
            step = resume["step"]
            fix = "replay the steps before and after it separately"
            if step < first:
                fix = f"no checkpoint from step {step} on is left to replay later steps from"
            raise ConfigError(
                f"{run.name}: a resume after step {step} changed {', '.join(changed)}; {fix}"
            )


class Replay:
    """A run as it was after some step; it continues step by step."""

    def __init__(
        self,
        components: Components,
        logged: dict[int, Event],
        *,
        saved_on: dict[str, Any],
        rounding: str | None,
    ) -> None:
        """`logged`: the events of the steps to replay; `saved_on`: the environment they were trained in; `rounding`:
        why results are equal only up to rounding, None if they are equal bit for bit.
        """
        self.components, self.logged = components, logged
        self.notes: tuple[str, ...] = ()  # checkpoints that were skipped
        self.start, self.state = components.start, components.state
        self.from_step, self.saved_on = components.state.step, saved_on
        self.loader = components.batches.loader
        self.departure: Departure | None = None
        self.rounding = rounding

    @property
    def tolerance(self) -> dict[str, float] | None:
        """The relative tolerance of a replay, by field; None: none."""
        return ROUNDING if self.rounding else None

    def other_environment(self) -> list[str]:
        """Return what differs between the environment of the run and this one."""
        return other_values(self.saved_on, self.components.facts["environment"])

    def close(self) -> None:
        """Close the shards."""
        self.loader.reader.close()

    def apply(self, change: Change) -> None:
        """Change the learning rate or precision of the steps from here on; `take` leaves out samples.

        Raises: ConfigError.
        """
        values = dict(change.settings)
        if dtype := values.get("dtype"):
            values["dtype"] = resolve_dtype(dtype, self.components.runtime.device)
            if dtype != "bf16":
                values["residual_dtype"] = "fp32"
        config = follow_peak(override(self.start.config, values), self.start.chosen)
        raise_problems(find_problems(config))
        strategy = self.components.strategy
        if dtype:
            strategy = Strategy(self.components.runtime, config.system)
            self.components.model.residual_dtype = config.system.residual_dtype
        self.start = dataclasses.replace(self.start, config=config)
        self.components = dataclasses.replace(self.components, start=self.start, strategy=strategy)

    def batch(self) -> GlobalBatch:
        """Read the batch that the log says the next step consumed."""
        return self.loader.fetch(self.logged[self.state.step + 1]["first_sample"])

    def samples_of(self, step: int) -> np.ndarray:
        """Return the numbers of the samples that a step consumed, (S,)."""
        first = self.logged[step]["first_sample"]
        return np.arange(first, first + self.start.plan.batch.samples)

    @functools.cached_property
    def documents(self) -> Documents:
        """Return the documents of the training data.

        Raises: ConfigError if they are unknown.
        """
        data, is_tuned = self.start.data, self.start.config.tuning.instructions is not None
        if is_tuned or (found := find_documents(data)) is None:
            raise ConfigError(
                f"{paths.display_path(data.folder)}: its documents are not marked; leave out samples instead"
            )
        return found

    def mask(self, step: int, change: Change) -> np.ndarray:
        """Return which targets of a step a change leaves out, (S, T) bool.

        Raises: ConfigError if documents are unknown.
        """
        samples, T = self.samples_of(step), self.start.config.model.context_length
        if change.without_documents:
            places = zip(*self.start.order.locate(samples), strict=True)
            rows = [self.documents.of_targets(shard, offset, T) for shard, offset in places]
            return np.isin(np.stack(rows), list(change.without_documents))
        rows_out = np.isin(samples, list(change.without_samples))
        return np.repeat(rows_out[:, None], T, axis=1)

    def require(self, change: Change, steps: range) -> None:
        """Reject a change of samples or documents that none of these steps trained on.

        Raises: ConfigError.
        """
        seen = np.concatenate([self.samples_of(step) for step in steps])
        missing = sorted(change.without_samples - set(seen.tolist()))
        if missing:
            raise ConfigError(
                f"sample {missing[0]:,}: {fmt.steps(steps[0], steps[-1])} trained on samples "
                f"{seen.min():,} to {seen.max():,}"
            )
        for number in sorted(change.without_documents):
            one = Change(without_documents=frozenset({number}))
            if not any(self.mask(step, one).any() for step in steps):
                raise ConfigError(
                    f"document {number:,}: none of its targets is in {fmt.steps(steps[0], steps[-1])}"
                )

    def take(self, change: Change = UNCHANGED, *, layers: bool = False) -> ReplayedStep:
        """Replay the next step."""
        number = self.state.step + 1
        batch = self.batch()
        if change.without_samples or change.without_documents:
            batch = without(batch, self.mask(number, change), step=number)
        norms: dict[str, float] = {}

        def look() -> None:
            if layers:
                norms.update(layer_norms(self.components.model))

        lr, stats = launch_step(self.components, number, batch, self.state, before_update=look)
        stats.done.wait()
        clip, norm = self.start.config.optim.grad_clip, stats.grad_norm
        scale = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0  # by which they were clipped
        self.state = state_after(self.state, batch, stats, self.start, seconds=0.0)
        event = {
            "step": number,
            "batch_hash": batch.hash,
            "lr": lr,
            "loss": finite(stats.loss),
            "grad_norm": finite(norm),
            "updated": stats.updated,
        }
        unclipped = {  # 0 of an infinite norm
            name: finite(value / scale) if scale else None for name, value in norms.items()
        }
        taken = ReplayedStep(event, self.logged[number], batch.num_targets, unclipped)
        found = first_difference(taken.logged, event, tolerance=self.tolerance)
        # No change affects which samples are read: a different batch means different data.
        if found and self.departure is None and (change == UNCHANGED or found[0] == "batch"):
            name, field = found
            self.departure = Departure(number, name, taken.logged.get(field), event[field])
        return taken

    def take_until(
        self, last: int, change: Change = UNCHANGED, *, layers: bool = False
    ) -> list[ReplayedStep]:
        """Replay all steps up to `last`."""
        with doing("replaying"):
            steps = counted(range(self.state.step, last), "steps")
            return [self.take(change, layers=layers) for _ in steps]

    def measure(
        self, batch: GlobalBatch, look: Callable[[], None] = lambda: None
    ) -> tuple[float, float]:
        """Return loss and gradient norm of a batch with the current weights, which are not updated.

        `look` is called when the gradients are complete, before clipping.
        """
        if (loss_scale := self.components.strategy.loss_scale) is not None:
            loss_scale.restore(self.state.loss_scale)
        stats = train_step(
            self.components.trained,
            self.components.optimizers,
            batch,
            0.0,
            strategy=self.components.strategy,
            grad_clip=0.0,
            seed=rng.fold_seed(self.start.config.data.seed, self.state.step + 1),
            accept=lambda loss, norm: False,
            before_update=look,
        )
        return stats.loss, stats.grad_norm


def without(batch: GlobalBatch, dropped: np.ndarray, *, step: int) -> GlobalBatch:
    """Return a batch without the targets of a mask, (S, T) bool; its loss is the mean over the others.

    Raises: ConfigError if no target is left.
    """
    micro_batches, begin = [], 0
    for micro in batch.micro_batches:
        end = begin + len(micro.targets)
        rows = torch.from_numpy(dropped[begin:end]).to(micro.targets.device)
        micro_batches.append(
            dataclasses.replace(micro, targets=micro.targets.masked_fill(rows, -1))
        )
        begin = end
    left = sum(int((micro.targets >= 0).sum()) for micro in micro_batches)
    if not left:
        raise ConfigError(f"step {step}: no target would be left")
    return dataclasses.replace(batch, micro_batches=tuple(micro_batches), num_targets=left)


def layer_norms(model: torch.nn.Module) -> dict[str, float]:
    """Return the L2 norm of the gradient of each layer, in the order of the model: wte, blocks.0, ..., ln_f."""
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            parts = name.split(".")
            layer = ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]
            square = parameter.grad.detach().double().square().sum().item()
            squares[layer] = squares.get(layer, 0.0) + square
    return {layer: math.sqrt(square) for layer, square in squares.items()}


@dataclass(frozen=True)
class ReplayResult:
    """The steps of a replay beside the log."""

    run: Path
    replay: Replay  # at its end
    change: str | None
    shown: list[ReplayedStep]
    # Gradient norms of the same steps without the change.
    unchanged_layers: dict[int, dict[str, float | None]]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        departure = self.replay.departure
        return {
            "run": str(self.run),
            "from_step": self.replay.from_step,
            "change": self.change,
            "compared": "rounding" if self.replay.rounding else "bits",
            "departure": departure and dataclasses.asdict(departure),
            "environment": self.replay.other_environment(),
            "steps": [
                {
                    "step": step.event["step"],
                    "logged": {name: step.logged.get(name) for name in step.event},
                    "replayed": step.event,
                    "targets": step.num_targets,
                    "layers": step.layers,
                    "layers_unchanged": self.unchanged_layers.get(step.event["step"], {}),
                }
                for step in self.shown
            ],
        }

    def describe(self) -> str:
        """Format the result."""
        first, last = self.shown[0].event["step"], self.shown[-1].event["step"]
        lines = [
            f"{paths.display_path(self.run)}, {fmt.steps(first, last)} from the checkpoint of step "
            f"{self.replay.from_step}{f', {self.change}' if self.change else ''}",
            *self.replay.notes,
        ]
        rows = [
            [
                str(step.event["step"]),
                *(
                    fmt.number(value, ".6f")
                    for name in ("loss", "grad_norm")
                    for value in (step.logged.get(name), step.event[name])
                ),
                f"{step.event['lr']:.4g}",
                f"{step.num_targets:,}",
            ]
            for step in self.shown
        ]
        header = ["step", "loss logged", "now", "norm logged", "now", "lr now", "targets"]
        lines.append(fmt.table(header, rows))
        for step in self.shown if self.shown[0].layers else []:
            as_was = self.unchanged_layers.get(step.event["step"])
            titles = ["layer", "norm unchanged", "now"] if as_was else ["layer", "norm"]
            body = [
                [name, *(fmt.number(of[name], ".6f") for of in (as_was, step.layers) if of)]
                for name in step.layers
            ]
            lines += [f"step {step.event['step']}, gradient norm by layer", fmt.table(titles, body)]
        lines.append(self._verdict(first if self.change else last + 1))
        return "\n".join(lines)

    def _verdict(self, end: int) -> str:
        """Return whether the unchanged steps, those before `end`, are as logged."""
        begin = self.replay.from_step + 1
        if (found := self.replay.departure) is not None:
            other = ", ".join(self.replay.other_environment())
            why = f"; likely cause: {other}" if other else ""
            return (
                f"not as logged: step {found.step} is the first that differs, in its {found.quantity} "
                f"(logged {_short(found.logged)}, now {_short(found.replayed)}){why}"
            )
        if begin == end:
            return "the change begins with the first step, so no step was compared with the log"
        which = fmt.steps(begin, end - 1)
        if self.replay.rounding is None:
            return f"{which}: batch, learning rate, loss and gradient norm are bitwise as logged"
        return (
            f"{which}: the same batches and learning rates; losses within 1e-5 and gradient norms within 1e-4, because "
            f"{self.replay.rounding}"
        )


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else repr(value)


def replay(run: RecordedRun, steps: range, change: Change, *, layers: bool = False) -> ReplayResult:
    """Replay the steps before `steps` unchanged, then `steps` with the change.

    `layers`: with the gradient norm of each layer.

    Raises: ConfigError, CheckpointError, DataError: see `open_replay`; ConfigError for a change of something that none
        of these steps trained on.
    """
    described = change.describe()
    unchanged: dict[int, dict[str, float | None]] = {}
    if layers and described is not None:
        as_was = open_replay(run, first=steps[0], last=steps[-1])
        taken = as_was.take_until(steps[-1], layers=True)
        unchanged = {step.event["step"]: step.layers for step in taken}
        as_was.close()
    again = open_replay(run, first=steps[0], last=steps[-1])
    again.require(change, steps)
    before = steps[0] - 1 if described else steps[-1]
    taken = again.take_until(before, layers=layers)
    if described:
        again.apply(change)
        taken += again.take_until(steps[-1], change, layers=layers)
    again.close()
    return ReplayResult(
        run.folder,
        again,
        described,
        [step for step in taken if step.event["step"] in steps],
        {number: norms for number, norms in unchanged.items() if number in steps},
    )
