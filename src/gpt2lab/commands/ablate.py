"""Compare settings of the trainer at equal tokens and seeds, and write a table with errors.

SETTINGS is a file with one setting per line, `name: flags of the trainer`; the first is the baseline. A flag of the
trainer with several values is a grid: each value with each setting. Each setting and seed is trained as a run of
its own, in a process of its own. `name: @REF flags` trains with the code of a branch, tag or commit.

gpt2lab ablate settings.txt --out runs/norms --seeds 1 2 3 --max_tokens 1M
gpt2lab ablate settings.txt --out runs/norms --target 3.5 --max_tokens 1M
gpt2lab ablate --out runs/rates --max_lr 1e-3 2e-3 4e-3 --max_tokens 1M
gpt2lab ablate settings.txt --out runs/norms --until_decided --max_tokens 1M
gpt2lab ablate --code main my-branch --until_decided --max_tokens 1M
"""

import contextlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt2lab import fmt, paths
from gpt2lab.commands.command_line import Actions, action_words, parse
from gpt2lab.commands.parser import WithJson, name_of, parse_flags
from gpt2lab.config.flags import argument, option
from gpt2lab.config.other_programs import answer
from gpt2lab.config.settings import LEAVES, is_list
from gpt2lab.errors import CheckError, ConfigError, DataError
from gpt2lab.lab.ablation import MAX_SEEDS, Ablation
from gpt2lab.lab.cluster import RAY, machine_of
from gpt2lab.lab.other_code import find_commits, with_code
from gpt2lab.lab.over_seeds import SMALLEST
from gpt2lab.lab.seed_runs import Setting, prefix_errors
from gpt2lab.runs import history

_OURS = {"seed", "run_name", "checkpoint_dir", "resume"}
_ANSWERS = {"list_checkpoints", "dry_run", "preflight", "save_config", "import_checkpoint"}
_OF_ONE_RUN = {"branch_from", "cooldown", "fit_schedule"}
_AT_MOST = 2**20  # characters of a settings file
_OUT = "folder of the runs and the table; a complete run is not repeated"
_NOTHING = (
    "nothing to compare: give a settings file, or several values to a flag, such as "
    "--max_lr 1e-3 2e-3 or --code main my-branch"
)


@dataclass(frozen=True)
class Ablate(WithJson):
    """Compare settings of the trainer; flags of the trainer apply to every run."""

    out: Path | None = option(
        None,
        f"{_OUT}. With --code the default is one below checkpoints/, named after the commits",
    )
    settings: Path | None = argument(
        "file with one `name: flags of the trainer` per line; the first is the baseline. Without it, give several "
        "values to a flag of the trainer",
        default=None,
    )
    code: tuple[str, ...] = option(
        (),
        "branches, tags or commits whose code to compare, `.` for the working tree; the first is the baseline. A "
        "change that leaves every bit as it was gets no seeds, but a comparison of seconds and memory",
    )
    jobs: int = option(
        1, "runs at the same time: each on a GPU of its own, or on its share of the cores", least=1
    )
    ray: str | None = option(None, RAY)
    seeds: tuple[int, ...] = option((1337,), "each setting is trained with each seed")
    target: float | None = option(
        None, "validation loss to reach; default: the last loss of the baseline with the same seed"
    )
    until_decided: bool = option(
        False,
        "add seeds until each setting is better than, worse than or equal to the baseline, by a confidence sequence",
    )
    max_seeds: int | None = option(
        None, f"with --until_decided: the most seeds to train; default {MAX_SEEDS}"
    )
    smallest_difference: float = option(
        SMALLEST,
        "settings are equal if the interval of the difference of their validation losses lies within +- this, in nats "
        "per token, and does not exclude 0; the table shows how many seeds would detect a difference of this size",
    )


_OWN = {*Ablate.__dataclass_fields__, "help", "help_all"}


def main(argv: list[str]) -> int:
    """Train what is missing, then write and print the table.

    Raises: CheckError after that if a run diverged.
    """
    words, shared, grid = take_grid(argv, _OWN)
    if shared and not words and not grid:
        raise ConfigError(_NOTHING)
    flags = parse_flags(Ablate, words, passed_on=shared)
    _check(flags)
    settings: dict[str, list[str]] = {"": []}
    if flags.settings is not None:
        settings = read_settings(paths.from_working_directory(flags.settings))
    settings = cross(settings, {**grid, "code": [*flags.code]} if flags.code else grid)
    if len(settings) < 2:
        raise ConfigError(_NOTHING)
    most = max(MAX_SEEDS, len(flags.seeds)) if flags.max_seeds is None else flags.max_seeds
    requests = read_requests(settings, shared)
    out = paths.from_working_directory(flags.out) if flags.out is not None else None
    has_code = any(one.ref is not None for one in requests.values())
    if has_code:
        repository, commits = find_commits([one.ref or "HEAD" for one in requests.values()])
        name = "_".join(["code", *(commit[:8] for commit in dict.fromkeys(commits.values()))])
        out = out or repository / "checkpoints" / name
    if out is None:
        raise ConfigError(f"--out is missing: {_OUT}; see gpt2lab ablate --help")
    if not has_code and (out / "code.json").exists():
        raise ConfigError(f"{out} has runs of other code; give another --out")
    with contextlib.ExitStack() as stack:
        ablation = Ablation(
            settings=requests,
            out=out,
            target=flags.target,
            smallest=flags.smallest_difference,
            max_seeds=most if flags.until_decided else None,
            jobs=flags.jobs,
            machine=stack.enter_context(machine_of(flags.ray)),
        )
        if has_code:
            code = with_code(ablation, repository, commits, seed=flags.seeds[0])
            ablation = stack.enter_context(code)
        runs = ablation.run(flags.seeds)
        markdown, document = ablation.write(runs)
    print(json.dumps(document) if flags.json else markdown)
    if diverged := [run.name for run in runs if history.has_diverged(run.folder)]:
        raise CheckError(
            f"{len(diverged)} of {len(runs)} runs diverged: {', '.join(diverged)}; give their settings a lower "
            f"--max_lr under another name"
        )
    return 0


def _check(flags: Ablate) -> None:
    if not 0 < flags.smallest_difference < math.inf:
        raise ConfigError(
            f"--smallest_difference {flags.smallest_difference:g} must be a number above 0"
        )
    if flags.target is not None and not math.isfinite(flags.target):
        raise ConfigError(f"--target {flags.target:g} must be a number")
    if flags.max_seeds is not None and not flags.until_decided:
        raise ConfigError("--max_seeds needs --until_decided; --seeds 1 2 3 names the seeds")


def take_grid(
    argv: Sequence[str], own: Collection[str]
) -> tuple[list[str], list[str], dict[str, list[str]]]:
    """Divide a command line into words of ablate, flags of the trainer, and {flag of the trainer: its several values}.

    `own`: the flags of ablate.

    Raises: ConfigError for a flag that neither has.
    """
    words: list[str] = []
    shared: list[str] = []
    grid: dict[str, list[str]] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name = name_of(word)
        if word[:2] != "--" or name in own:
            words.append(word)
            continue
        most, following = _words_of(name, own), [] if "=" in word else rest
        values = list(itertools.takewhile(lambda one: one[:2] != "--", following))[:most]
        del rest[: len(values)]
        if len(values) > 1 and not is_list(name):
            grid[name] = values
        else:
            shared += [word, *values]
    return words, shared, grid


def _words_of(name: str, own: Collection[str]) -> int | None:
    """Return the largest number of words that a flag of the trainer takes; None: any number, which makes a grid."""
    if name in LEAVES:
        return 0 if LEAVES[name][1].type == "bool" else None
    if name in Actions.__dataclass_fields__:
        return 0 if Actions.__dataclass_fields__[name].type == "bool" else 1
    if name.startswith("no_") and name[3:] in LEAVES:
        return 0
    known = [*own, *LEAVES, *Actions.__dataclass_fields__]
    hint = fmt.did_you_mean(name, known, "see gpt2lab ablate --help", flag="--")
    raise ConfigError(f"unknown flag --{name}: {answer(name) or hint}")


def cross(settings: dict[str, list[str]], grid: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return each setting with each combination of the grid's values; the first combination is the baseline.

    Raises: ConfigError if a value is duplicated, or two values make the same name.
    """
    for flag, values in grid.items():
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ConfigError(f"--{flag}: {twice} is duplicated")
        crossed = {
            "_".join(filter(None, (name, f"{flag}-{re.sub(r'[^A-Za-z0-9_.+-]', '_', value)}"))): [
                *flags,
                f"--{flag}={value}",
            ]
            for name, flags in settings.items()
            for value in values
        }
        if len(crossed) < len(settings) * len(values):
            raise ConfigError(
                f"--{flag} {' '.join(values)}: some of their runs would have the same name; name the settings in a file"
            )
        settings = crossed
    return settings


def read_settings(path: Path) -> dict[str, list[str]]:
    """Return {setting: its flags} of a settings file, in its order; `#` begins a comment line, `@REF` names code.

    Raises: ConfigError naming the line, DataError if there is no such file.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(_AT_MOST + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(
            f"{path}: {why}; values to compare are flags: --weight_decay 0 0.1"
        ) from error
    settings: dict[str, list[str]] = {}
    if len(text) > _AT_MOST:
        raise ConfigError(f"{path}: over {_AT_MOST:,} characters")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, flags = line.partition(":")
        if not colon or re.fullmatch(r"[\w.+-]+", name.strip()) is None:
            raise ConfigError(f"{path} line {number}: not `name: flags of the trainer`")
        if name.strip() in settings:
            raise ConfigError(f"{path} line {number}: setting {name.strip()} is duplicated")
        try:
            settings[name.strip()] = shlex.split(re.sub(r"^\s*@", "--code=", flags))
        except ValueError as error:
            raise ConfigError(f"{path} line {number}: {error}") from error
    if len(settings) < 2:
        count = fmt.number_of(len(settings), "setting")
        raise ConfigError(f"{path}: {count}; a comparison needs at least 2")
    return settings


def read_requests(
    settings: Mapping[str, Sequence[str]], shared: Sequence[str]
) -> dict[str, Setting]:
    """Return {setting: what the trainer is asked for}, given the flags of each setting and those of all.

    Raises: ConfigError for flags that the trainer does not have, and for those that ablate sets itself.
    """
    found = {}
    for name, own in settings.items():
        refs = [word.partition("=")[2] for word in own if word.startswith("--code=")]
        words = [*shared, *(word for word in own if not word.startswith("--code="))]
        with prefix_errors(name):
            # A --config file may have a seed; ablate overrides it.
            if ours := _OURS & set(map(name_of, words)):
                raise ConfigError(f"--{min(ours)} is set by ablate itself")
            if answers := _ANSWERS & set(map(name_of, words)):
                raise ConfigError(f"--{min(answers)} trains nothing; leave it out")
            if of_one := _OF_ONE_RUN & set(map(name_of, words)):
                raise ConfigError(f"--{min(of_one)} is for a run on its own; leave it out")
            if len(refs) > 1:
                raise ConfigError(f"it names code twice, {' and '.join(refs)}")
            found[name] = Setting(
                parse(words).request, tuple(action_words(words)), refs[0] if refs else None
            )
    return found
