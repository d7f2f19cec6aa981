"""Other code for the runs of an ablation: commits in git worktrees, and whether a change touches a bit. No torch.

Before seeds decide, short runs of each code are compared with those of the baseline, to the bit. If nothing differs,
more of them, in turns, compare seconds and memory, and the setting needs no seeds.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpt2lab import fmt, paths
from gpt2lab.errors import CheckError, ConfigError, SavedInterrupt, SaveError, system_errors_as
from gpt2lab.files import JsonFile, replace_durably, temporary_folder
from gpt2lab.lab.ablation import Ablation
from gpt2lab.lab.seed_runs import Setting, check_runs, chosen_values, plan_runs, run_all
from gpt2lab.lab.stats import over_seeds
from gpt2lab.runs import history
from gpt2lab.runs.console import say

WORKING_TREE = "."
STEPS = 20  # of a short run
TURNS = 5  # that are timed
LEAST = 0.01  # steps that are faster or slower by a smaller share count as equal
_NUMBERS = ("batch_hash", "lr", "loss", "grad_norm")  # of a step, in the order of cause and effect
_SHORT = 12  # digits of a commit's name
_VAL_TOKENS = 65_536  # at most, of a short run
# What decides what a loss means.
_MEASURES = ("--", *(f"src/gpt2lab/{name}" for name in ("evaluation", "data", "tokenizers")))
# Settings that only surround a run; a short run is without them.
_SURROUNDINGS = ("track", "use_", "checkpoint_mirror", "hellaswag_", "core", "max_hours")
_OF_LENGTH = ("warmup_steps", "data_weights_at")  # a whole run of few steps has its own, or none

# -- git -------------------------------------------------------------------------------------------------------------


def _git(folder: Path, *words: str, **variables: str) -> str:
    """Return what git prints; it sees no variables of a hook that called us, and runs no hooks.

    Raises: ConfigError with git's last line.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    call = ["git", "-c", "core.hooksPath=/dev/null", "-C", str(folder), *words]
    with system_errors_as(ConfigError, "git"):
        done = subprocess.run(call, env={**own, **variables}, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip() or "failed").splitlines()[-1]
        raise ConfigError(f"git {words[0]} in {folder}: {reason}")
    return done.stdout.strip()


def find_commits(refs: Sequence[str]) -> tuple[Path, dict[str, str]]:
    """Return the repository of gpt2lab that holds the working directory, else this program's, and {ref: its commit}.

    `.` is the working tree's src/, as a commit that no branch holds: the same one for the same content.

    Raises: ConfigError for a ref that does not exist, and for uncommitted changes of a commit that is named.
    """
    if shutil.which("git") is None:
        raise ConfigError("git: not found in PATH; install it to compare code")
    repository = None
    for folder in (paths.REPOSITORY, Path.cwd()):
        with contextlib.suppress(ConfigError):
            top = Path(_git(folder, "rev-parse", "--show-toplevel"))
            repository = top if (top / "src" / "gpt2lab").is_dir() else repository
    if repository is None:
        raise ConfigError(
            f"neither {Path.cwd()} nor {paths.REPOSITORY} is in a git repository of gpt2lab, which other code comes "
            f"from; call gpt2lab in a clone"
        )
    commits = {ref: _commit_of(repository, ref) for ref in refs}
    if WORKING_TREE not in refs and _commit_of(repository, "HEAD") in commits.values():
        changed = _git(repository, "status", "--porcelain", "--", "src").splitlines()
        if changed:
            raise ConfigError(
                f"{repository} has {fmt.number_of(len(changed), 'changed file')} in no commit, such as "
                f"{changed[0].split()[-1]}; commit them, or name the working tree with `.`"
            )
    return repository, commits


def _commit_of(repository: Path, ref: str) -> str:
    if ref == WORKING_TREE:
        return _snapshot(repository)
    with contextlib.suppress(ConfigError):
        words = ("--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
        return _git(repository, "rev-parse", *words)
    branches = _git(repository, "for-each-ref", "--format=%(refname:short)").split()
    hint = fmt.did_you_mean(ref, branches, "see git branch --all")
    raise ConfigError(f"{ref}: no branch, tag or commit of {repository}; {hint}")


def _snapshot(repository: Path) -> str:
    """Return a commit of what src/ holds now, new files included."""
    facts = {"NAME": "gpt2lab", "EMAIL": "gpt2lab", "DATE": "2000-01-01T00:00:00Z"}
    who = {f"GIT_{one}_{x}": facts[x] for one in ("AUTHOR", "COMMITTER") for x in facts}
    with tempfile.TemporaryDirectory() as folder:
        index = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        _git(repository, "read-tree", "HEAD", **index)
        _git(repository, "add", "--all", "--", "src", **index)
        tree = _git(repository, "write-tree", **index)
    if tree == _git(repository, "rev-parse", "HEAD^{tree}"):
        return _commit_of(repository, "HEAD")
    about = ("-p", "HEAD", "-m", "The working tree, for gpt2lab ablate")
    return _git(repository, "commit-tree", tree, *about, **who)


@contextlib.contextmanager
def _checked_out(repository: Path, commits: Iterable[str], out: Path) -> Iterator[Path]:
    """Hand out a folder beside `out` with a git worktree of each commit, by its short name; all go in the end."""
    with contextlib.ExitStack() as stack:
        with system_errors_as(ConfigError, out, fix="choose another --out"):
            place = stack.enter_context(temporary_folder(out))
        for commit in dict.fromkeys(commits):
            folder = place / commit[:_SHORT]
            _git(repository, "worktree", "add", "--detach", str(folder), commit)
            stack.callback(_git, repository, "worktree", "remove", "--force", str(folder))
            if not (folder / "src" / "train.py").is_file():
                raise ConfigError(f"{folder.name} has no src/train.py: it is no commit of gpt2lab")
        yield place


# -- an ablation of code ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def with_code(
    ablation: Ablation, repository: Path, commits: Mapping[str, str], *, seed: int
) -> Iterator[Ablation]:
    """Yield the ablation of what seeds must decide, each setting with its own code, and with the facts of all.

    `code.json` keeps settings and facts: a second start neither repeats the short runs nor mixes other code in.

    Raises: ConfigError, CheckError, SaveError, KeyboardInterrupt.
    """
    of = {name: commits[one.ref or "HEAD"] for name, one in ablation.settings.items()}
    asked = {
        name: {"commit": of[name], "flags": [*one.flags], "settings": chosen_values(one.request)}
        for name, one in ablation.settings.items()
    }
    for a, b in itertools.combinations(asked, 2):
        if asked[a] == asked[b]:
            raise ConfigError(
                f"{a} and {b} are the same commit, {of[a][:_SHORT]}, and the same flags"
            )
    file = JsonFile(ablation.out / "code.json", ConfigError, fix="give another --out")
    kept = file.read() if file.path.exists() else {}
    if kept.get("asked") != asked if kept else (ablation.out / "settings").exists():
        raise file.rejected("the runs there began with other commits or settings")
    with _checked_out(repository, of.values(), ablation.out) as place:
        settings = {
            name: dataclasses.replace(one, code=place / of[name][:_SHORT])
            for name, one in ablation.settings.items()
        }
        check_runs(plan_runs(settings, seeds=(seed,), out=ablation.out))
        facts = kept.get("facts")
        if not isinstance(facts, dict):
            base = next(iter(of))
            same = [n for n in of if asked[n] | {"commit": of[base]} == asked[base]]
            facts = compare_bits({n: settings[n] for n in same}, seed=seed, place=place)
            for name, own in facts.items():
                changed = _git(repository, "diff", "--name-only", of[base], of[name], *_MEASURES)
                own["changes_measurement"] = files = changed.split()
                if files and not own["same_arithmetic"]:
                    what = f"{fmt.number_of(len(files), 'file')}, such as {files[0]}"
                    said = (
                        f"{name} measures its loss with other code than {base}: it changes {what}."
                    )
                    own["sentences"].append(said)
            with system_errors_as(SaveError, file.path, fix="choose another --out"):
                ablation.out.mkdir(exist_ok=True)
                text = json.dumps({"asked": asked, "facts": facts}, indent=1)
                replace_durably(file.path, text + "\n")
        facts = {name: {"commit": of[name]} | facts.get(name, {}) for name in settings}
        left = {n: one for n, one in settings.items() if not facts[n].get("same_arithmetic")}
        yield dataclasses.replace(ablation, settings=left, code=facts)


def compare_bits(
    settings: Mapping[str, Setting], *, seed: int, place: Path
) -> dict[str, dict[str, Any]]:
    """Return what short runs show of settings that differ in their code alone; the first is the baseline.

    Compared are a whole run of few steps, so that the end of the schedule counts, and the first steps of the run that
    was asked for: uncompiled, because a compiler orders sums anew. Where no bit differs, turns of the run as it was
    asked for compare seconds and memory.

    Raises: CheckError if a run fails, or if the baseline diverges; KeyboardInterrupt, which keeps none of them.
    """
    baseline, *same = settings
    found: dict[str, dict[str, Any]] = {}
    logs: dict[str, list[history.Log]] = {name: [] for name in settings}
    bits = {"compile": "off", "deterministic": True}
    turns: list[dict[str, Any]] = [bits | {"max_steps": STEPS}, bits, *[{}] * TURNS]
    for number, changed in enumerate(turns):
        if not same:
            break
        order = [baseline, *same][:: -1 if number % 2 else 1]
        say(f"short runs, turn {number + 1} of {len(turns)}: {' and '.join(order)}")
        placed = {name: _cut_short(settings[name], changed) for name in order}
        runs = plan_runs(placed, seeds=(seed,), out=place / f"turn{number}")
        try:
            run_all(runs, on_divergence="continue", may_stop=True)
        except SavedInterrupt:
            raise KeyboardInterrupt("the next start repeats all short runs") from None
        if all(history.has_diverged(run.folder) for run in runs):
            raise CheckError(
                f"{' and '.join(order)} diverge within {STEPS} steps; lower the learning rate"
            )
        ran = {run.setting: history.read_log(run.folder) for run in runs}
        for name, log in ran.items():
            logs[name] += [] if changed else [log]
            where = _first_difference(ran[baseline], log) if changed else None
            if where is not None:
                said = f"{name} touches the arithmetic: {where}, by seed {seed}."
                found[name] = {"same_arithmetic": False, "sentences": [said]}
                same.remove(name)
    return found | {name: _costs(name, baseline, logs) for name in same}


def _cut_short(setting: Setting, changed: Mapping[str, Any]) -> Setting:
    """Return the first steps of a setting, without what only surrounds a run."""
    val_tokens = min(setting.request.config.eval.val_tokens, _VAL_TOKENS)
    off = {"eval_freq": 0, "sample_freq": 0, "checkpoint_freq": 0, "val_tokens": val_tokens}
    request = setting.request.with_settings(**off, **changed)
    left_out = (*_SURROUNDINGS, *_OF_LENGTH) if "max_steps" in changed else _SURROUNDINGS
    chosen = {name for name in request.chosen if not name.startswith(left_out)}
    request = dataclasses.replace(request, chosen=frozenset(chosen))
    flags = (*setting.flags, f"--stop_after_steps={STEPS}")
    return dataclasses.replace(setting, request=request, flags=flags)


def _first_difference(base: history.Log, own: history.Log) -> str | None:
    """Return where the bits of a short run differ first from the baseline's; None if none does."""
    steps = (log.current_steps() for log in (base, own))
    for a, b in itertools.zip_longest(*steps, fillvalue=dict[str, Any]()):
        for name in ("step", *_NUMBERS):
            if a.get(name) != b.get(name):
                return f"{name} of step {b.get('step')} is {b.get(name)} instead of {a.get(name)}"
    x, y = ([event["val_loss"] for event in log.of_kind("eval")] for log in (base, own))
    return None if x == y else f"validation losses are {y} instead of {x}"


def _costs(name: str, baseline: str, logs: Mapping[str, list[history.Log]]) -> dict[str, Any]:
    """Return the seconds of a step and the peak memory beside the baseline's, turn by turn."""
    seconds: dict[str, list[float]] = {name: [], baseline: []}
    for one, found in seconds.items():
        for log in logs[one]:  # what else the machine does only adds to a step: its lower quartile
            of_steps = log.column("step_seconds")
            of_steps = of_steps[history.WARM_UP :] if len(of_steps) > history.WARM_UP else of_steps
            found.append(float(np.quantile(of_steps, 0.25)))
    memory = {one: max(log.peak_memory() or 0 for log in logs[one]) for one in (name, baseline)}
    ratio = over_seeds([a / b for a, b in zip(*seconds.values(), strict=True)])
    assert ratio.low is not None
    assert ratio.high is not None
    faster, slower = ratio.high < 1 - LEAST, ratio.low > 1 + LEAST
    speed = "faster" if faster else "slower" if slower else "not decided"
    a, b = (fmt.num_bytes(one) for one in memory.values())
    steps = fmt.number_of(len(logs[baseline][0].numbers), "step")
    said = (
        f"{name} does not touch the arithmetic: the first {steps}, and a whole run of {STEPS} steps, have the "
        f"bits of {baseline}. A step takes {ratio.mean:.3f} of its time (95 % interval {ratio.low:.3f} to "
        f"{ratio.high:.3f} over {TURNS} turns: {speed}) and {a} of memory instead of {b}."
    )
    return {
        "same_arithmetic": True,
        "sentences": [said],
        "speed": speed,
        "time_ratio": {"value": ratio.mean, "low": ratio.low, "high": ratio.high},
        "step_seconds": seconds,
        "peak_memory_bytes": memory,
    }
