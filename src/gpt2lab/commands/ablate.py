"""Compare settings of the trainer at equal tokens and seeds, and write a table with errors.

gpt2lab ablate settings.txt --out checkpoints/ablation --seeds 1 2 3 --max_tokens 1M --data_dir data/my_texts
gpt2lab ablate settings.txt --out checkpoints/ablation --target 3.5 --max_tokens 1M

A settings file has one setting a line, `name: flags of the trainer`; the first is the baseline. Each setting and seed
is a run of its own: a fresh process with the trainer's command line.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from gpt2lab import paths
from gpt2lab.commands.ablation_table import Run, write_table
from gpt2lab.config.command_line import Command, argument, option, parse, run_tyro
from gpt2lab.config.settings import policy_of, to_flat
from gpt2lab.errors import CheckError, ConfigError, DataError, GPT2LabError
from gpt2lab.runs import history

if TYPE_CHECKING:
    from gpt2lab.training.start import Start

_OURS = {"seed", "run_name", "checkpoint_dir"}
_SHARED = ("data_dir", "val_tokens")  # validation losses compare only if these are equal


@dataclass(frozen=True)
class Ablate:
    """Compare settings of the trainer; flags of the trainer are passed on to every run."""

    settings: Positional[Path] = argument(
        "file of one `name: flags of the trainer` a line; the first is the baseline"
    )
    out: Path = argument(
        "folder of the runs and the table; a run that is complete is not run again"
    )
    seeds: tuple[int, ...] = option((1337,), "each setting is run with each of them")
    target: float | None = option(
        None, "validation loss to reach; default, seed by seed, the last one of the first setting"
    )
    json: bool = option(False, "print one JSON object")


def main(argv: list[str]) -> int:
    """Run what is missing, then write and print the table."""
    shared: list[str] = []
    flags = run_tyro(Ablate, argv, passed_on=shared)
    out = paths.from_working_directory(flags.out)
    settings = read_settings(paths.from_working_directory(flags.settings))
    runs = plan_runs(settings, shared, seeds=flags.seeds, out=out)
    carry_out(runs, say=lambda line: print(line, file=sys.stderr, flush=True))
    markdown, as_json = write_table(runs, out, target=flags.target)
    print(json.dumps(as_json) if flags.json else markdown)
    return 0


def read_settings(path: Path) -> dict[str, list[str]]:
    """Return {setting: its flags} of a settings file, in its order; `#` begins a comment line.

    Raises: ConfigError naming the line, DataError if there is no such file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    settings: dict[str, list[str]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, flags = line.partition(":")
        if not colon or re.fullmatch(r"[\w.+-]+", name.strip()) is None:
            raise ConfigError(f"{path} line {number}: not `name: flags of the trainer`")
        if name.strip() in settings:
            raise ConfigError(f"{path} line {number}: a second setting {name.strip()}")
        try:
            settings[name.strip()] = shlex.split(flags)
        except ValueError as error:
            raise ConfigError(f"{path} line {number}: {error}") from error
    if len(settings) < 2:
        raise ConfigError(f"{path}: {len(settings)} settings; a comparison needs at least 2")
    return settings


def plan_runs(
    settings: dict[str, list[str]], shared: Sequence[str], *, seeds: Sequence[int], out: Path
) -> list[Run]:
    """Return all runs, seed by seed, so that an ablation that is stopped early has complete comparisons.

    Raises: ConfigError, DataError: whatever the trainer would reject, and what makes losses incomparable.
    """
    if len(set(seeds)) != len(seeds):
        raise ConfigError(f"seeds {' '.join(map(str, seeds))}: each may be given once")
    runs = []
    for seed in seeds:
        for name, flags in settings.items():
            place = [f"--seed={seed}", f"--checkpoint_dir={out}", f"--run_name={name}_seed{seed}"]
            try:
                typed = parse([*shared, *flags])
                ours = _OURS & typed.typed | ({"resume"} if typed.verbs.resume else set())
                if ours:
                    raise ConfigError(f"--{min(ours)} is set by the ablation itself")
                command = parse([*shared, *flags, *place, "--resume=auto"])
                _start_of(command)
            except GPT2LabError as error:
                raise type(error)(f"setting {name}: {error}") from None
            runs.append(Run(name, seed, command))
    for flag in _SHARED:
        found = {str(to_flat(run.command.fresh())[flag]): run.setting for run in runs}
        if len(found) > 1:
            (one, first), (other, second) = list(found.items())[:2]
            raise ConfigError(
                f"{flag} {one} in {first}, {other} in {second}: their losses would not compare"
            )
    return runs


def _start_of(command: Command) -> "Start":
    """Decide what the trainer would do; reject an old run that had other settings."""
    from gpt2lab.training.resolve import fresh_settings, resolve

    fresh, _ = fresh_settings(command)
    run_dir = fresh.checkpoint.checkpoint_dir / str(fresh.checkpoint.run_name)
    if (run_dir / "config.json").exists():
        wanted, had = to_flat(fresh), to_flat(history.read_config(run_dir))
        for name, value in wanted.items():
            differs = value not in (None, "auto") and had[name] != value
            if differs and policy_of(name, fresh) != "free":
                raise ConfigError(
                    f"{paths.for_people(run_dir)} was run with {name} {had[name]}, not {value}; "
                    f"name the setting otherwise or remove that folder"
                )
    return resolve(command, world_size=1, set_aside=False)


def carry_out(runs: Sequence[Run], *, say: Callable[[str], None]) -> None:
    """Run what is not complete yet, one fresh process after the other; each writes its own log.txt.

    Raises: CheckError if one fails or stops early; started again, the ablation goes on where it stood.
    """
    from gpt2lab.training.stop import end_with_parent

    for number, run in enumerate(runs, start=1):
        start = _start_of(run.command)
        place = f"[{number}/{len(runs)}] {run.name}"
        if start.is_complete:
            say(f"{place}: complete")
            continue
        say(f"{place}: {start.plan.max_steps:,} steps, {start.plan.tokens:,} tokens")
        done = subprocess.run(
            [sys.executable, *paths.trainer("train"), *run.command.argv],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent,  # else a run would go on alone, and be in the way of the next start
        )
        if done.returncode:
            reason = (done.stderr.strip() or "no message").splitlines()[-1]
            raise CheckError(f"{run.name} failed with exit code {done.returncode}: {reason}")
        if not _start_of(run.command).is_complete:
            raise CheckError(f"{run.name} stopped before its end; start again to go on with it")
