"""The request for one start of the trainer: settings, chosen names, what to resume, what may change. No torch.

The command line, a settings file, the Python API, `ablate`, `ladder` and `replay` each make a `RunRequest`; nothing
below `commands/` sees a command line. A setting that no person chose may follow from others: `fill_in` computes what
follows, at the start and on a resume. config.json and every checkpoint record the names that were chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpt2lab import paths
from gpt2lab.config.presets import PRESETS, for_length, preset
from gpt2lab.config.schema import LENGTHS, Config, OptimConfig, RecipeName
from gpt2lab.config.settings import LEAVES, is_path, override, policy_of, resolved, to_flat
from gpt2lab.errors import ConfigError

_LOCATION = ("checkpoint_dir", "run_name")
# What to do about a loss that is not finite, or that spikes again and again.
LOWER_RATE = "with a lower --max_lr and --allow_change max_lr"
FOLLOWS = frozenset({"min_lr", "warmup_steps"})  # from the peak, and from the length of the run


@dataclass(frozen=True)
class RunRequest:
    """One start of a run, as it was asked for."""

    # Of a fresh start: defaults < preset < file < typed.
    config: Config = field(default_factory=Config)
    chosen: frozenset[str] = frozenset()  # settings that a person chose, typed or in a file
    typed: frozenset[str] = frozenset()  # those of them that were given for this start alone
    recipe: RecipeName = "pretrain"
    resume: str | None = None  # latest | auto | best | STEP | folder of a checkpoint
    branch_from: Path | None = None  # the checkpoint of another run that a new run continues from
    allowed_changes: frozenset[str] = frozenset()  # settings, and `data`, that a resume may change
    stop_after_steps: int | None = None
    stop_at: str | None = None  # a moment: HH:MM, or an ISO date and time
    open_settings: frozenset[str] = frozenset()  # left to the planner: mini_batch_size, max_steps
    timeout_minutes: float = 60.0  # of the process group

    @property
    def leaves_mini_batch(self) -> bool:
        """Tell whether the planner chooses the micro-batch."""
        return "mini_batch_size" in self.open_settings

    @property
    def fixes_mini_batch(self) -> bool:
        """Tell whether the micro-batch, or the batch that it divides, was typed for this start."""
        is_typed = not self.typed.isdisjoint(("mini_batch_size", "total_batch_size"))
        return is_typed and not self.leaves_mini_batch

    def over(self, saved: Config) -> Config:
        """Return saved settings with the chosen ones on top; another preset counts as choosing each of its settings."""
        names = set(self.chosen)
        if "model" in names and self.config.model.model != saved.model.model:
            names |= PRESETS[self.config.model.model].keys()
        if names & set(LENGTHS):  # one setting in three units
            names |= set(LENGTHS)
        flat = to_flat(self.config)
        return with_full_paths(override(saved, {name: flat[name] for name in names}))

    def with_settings(self, **settings: Any) -> RunRequest:
        """Return the request with other settings, chosen for this start, by the names of their flags."""
        values = dict.fromkeys(LENGTHS) | settings if settings.keys() & set(LENGTHS) else settings
        return dataclasses.replace(
            self,
            config=with_full_paths(override(self.config, values)),
            chosen=self.chosen.union(settings),
            typed=self.typed.union(settings),
        )


def with_full_paths(config: Config) -> Config:
    """Return the settings with relative paths resolved against the repository; typed ones are absolute already."""
    files = {name: value for name, value in to_flat(config).items() if value and is_path(name)}
    return override(
        config, {n: resolved(n, value, paths.from_repository) for n, value in files.items()}
    )


# -- chosen, and what follows ----------------------------------------------------------------------------------------


def default_warmup(max_steps: int) -> int:
    """Return 715 steps (GPT-3's 375M tokens at 524,288 a step), or a tenth of a shorter run."""
    return min(715, max_steps // 10)


def default_min_lr(max_lr: float) -> float:
    """Return a tenth of the peak, rounded so that the value which people read, and type again, is the value."""
    return float(f"{max_lr / 10:.12g}")


def fill_in(config: Config, max_steps: int) -> Config:
    """Return the settings with what follows from others as numbers: floor and warm-up of the rate, length of the run.

    A resume keeps the warm-up that its steps were trained with, and a floor follows another peak: see `follow_peak`.
    """
    optim, length = config.optim, config.length
    if optim.min_lr is None:
        optim = dataclasses.replace(optim, min_lr=default_min_lr(optim.max_lr))
    if optim.warmup_steps is None:
        optim = dataclasses.replace(optim, warmup_steps=default_warmup(max_steps))
    if (length.max_steps, length.max_tokens, length.num_epochs) == (None, None, None):
        length = dataclasses.replace(length, num_epochs=1.0)
    return dataclasses.replace(config, optim=optim, length=length)


def suit_length(
    config: Config, chosen: Collection[str], tokens: float, *, world_size: int
) -> Config:
    """Return the settings with the batch and rates that suit a run of so many tokens, but for those that were chosen.

    Every rank gets a sequence of a step, or its micro-batch if that was chosen or decides the masks of dropout.
    """
    suited = for_length(config.model.model, config.optim.optimizer, tokens)
    suited = {name: value for name, value in suited.items() if name not in chosen}
    if "total_batch_size" in suited:
        is_fixed = "mini_batch_size" in chosen or config.model.dropout > 0
        sequences = config.batch.mini_batch_size if is_fixed else 1
        least = sequences * config.model.context_length * world_size
        suited["total_batch_size"] = max(suited["total_batch_size"], least)
    return override(config, suited) if suited else config


def follow_peak(config: Config, chosen: Collection[str]) -> Config:
    """Return the settings of a resume whose floor follows the peak, unless it was chosen, or the preset has one."""
    if "min_lr" in {*chosen, *PRESETS[config.model.model]}:
        return config
    min_lr = default_min_lr(config.optim.max_lr)
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, min_lr=min_lr))


def chosen_in(values: Mapping[str, Any]) -> frozenset[str]:
    """Return the names that were chosen in the settings of a run, by its record `chosen`, else by the values.

    Runs of earlier versions have no record: there a value that equals what would follow from the others, or that the
    preset has, is not chosen. How long a run of epochs is only its data tell, so that its warm-up counts as chosen.
    """
    recorded = values.get("chosen")
    if "num_tokens" not in values and not isinstance(recorded, list):
        return frozenset(values)  # no run wrote it
    config = override(Config(), {n: v for n, v in values.items() if n in LEAVES})
    steps, own = _steps_of(config), PRESETS[config.model.model]
    if isinstance(recorded, list):
        # The file may have been edited: a value that neither follows nor is the preset's was chosen.
        known = (FOLLOWS if steps is not None else {"min_lr"}) & values.keys()
        edited = {n for n in known if values[n] != own.get(n, ())} - _following(config.optim, steps)
        return frozenset(name for name in LEAVES if name in recorded) | edited
    plain = to_flat(with_full_paths(preset(config.model.model, optimizer=config.optim.optimizer)))
    now = to_flat(config)
    chosen = {name for name in values if name in LEAVES and now[name] != plain[name]}
    return frozenset(chosen - _following(config.optim, steps))


def _following(optim: OptimConfig, steps: int | None) -> set[str]:
    """Return which of FOLLOWS have the value that follows from the settings themselves."""
    found = set()
    if optim.min_lr == default_min_lr(optim.max_lr):
        found.add("min_lr")
    if steps is not None and optim.warmup_steps == default_warmup(steps):
        found.add("warmup_steps")
    return found


def _steps_of(config: Config) -> int | None:
    """Return the length in steps, as far as the settings alone tell it; epochs need the data."""
    if config.length.max_steps is not None or config.length.max_tokens is None:
        return config.length.max_steps
    return config.length.max_tokens // config.batch.total_batch_size


# -- what a resume may change -----------------------------------------------------------------------------------------


def find_changes(saved: Config, now: Config) -> dict[str, list[Any]]:
    """Return {flag: [saved, now]} of all that differs but where the run lies."""
    before, after = to_flat(saved), to_flat(now)
    return {
        name: [before[name], after[name]]
        for name in after
        if name not in _LOCATION and before[name] != after[name]
    }


def describe_change(name: str, change: list[Any]) -> str:
    """Write what a setting was and is, as it is typed; of a fingerprint as much as is shown elsewhere."""
    words = (" ".join(value) if isinstance(value, list) else str(value) for value in change)
    return " -> ".join(word[:12] if name == "data" else word for word in words)


def reject_changes(
    request: RunRequest, config: Config, changes: dict[str, list[Any]], *, run: str
) -> None:
    """Reject changes of what is fixed, and of what is guarded without --allow_change; other data count as guarded.

    Raises: ConfigError naming each setting, and the flag that allows it.
    """
    allowed = set(request.allowed_changes)
    if "max_lr" in allowed and "min_lr" not in request.chosen:
        allowed.add("min_lr")  # it follows
    policies = {name: "guarded" if name == "data" else policy_of(name, config) for name in changes}
    fixed = [name for name, policy in policies.items() if policy == "fixed"]
    guarded = [n for n, policy in policies.items() if policy == "guarded" and n not in allowed]

    def show(names: list[str]) -> str:
        if "data" in names:  # fingerprints do not say what was mistyped
            names = [*names, *(name for name in ("data_dir", "instructions") if name in changes)]
        return ", ".join(f"{name} {describe_change(name, changes[name])}" for name in names)

    counts = ("total_batch_size", "data", "packing", "val_fraction")
    recounted = [name for name in counts if name in changes]
    if recounted and config.length.max_steps is None:
        raise ConfigError(
            f"run {run}: with {show(recounted)} a length in epochs or tokens means another number of steps; "
            f"say how many with --max_steps N --allow_change max_steps,{','.join(recounted)}"
        )
    if fixed:
        what = "with another architecture"
        if fixed == ["init_from"]:
            what = "from different initial weights"
        raise ConfigError(f"run {run} cannot continue {what}: {show(fixed)}; start a new run")
    if "optimizer" in changes and "max_lr" not in request.chosen:
        before, now = changes["optimizer"]
        raise ConfigError(
            f"run {run}: optimizer {before} -> {now}, and max_lr {config.optim.max_lr:g} was chosen for {before}; "
            f"give the rate for {now}, too: --max_lr RATE --allow_change optimizer,max_lr"
        )
    if guarded:
        named = [name for name in guarded if name in request.chosen or name == "data"] or guarded
        raise ConfigError(
            f"run {run} would change the training computation: {show(guarded)}; "
            f"leave it as it was, or add --allow_change {','.join(named)} to record the change"
        )
