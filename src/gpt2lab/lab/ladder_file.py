"""The file of a ladder: sizes, numbers of tokens, seeds and the rule of the learning rate, and the runs they mean.

TOML; `[settings]`, the tables of `[sizes]` and `[top]` hold settings by the names of the trainer's flags. No torch.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gpt2lab import fmt, paths
from gpt2lab.config.request import RunRequest, default_warmup
from gpt2lab.config.settings_file import make_request, read_values
from gpt2lab.errors import ConfigError, GPT2LabError
from gpt2lab.files import read_regular
from gpt2lab.lab.seed_runs import SeedRun, Setting, plan_runs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_AT_MOST = 2**20  # bytes of a file
_DECAY = 0.1  # of a trunk's lengths: with 1 - sqrt as good as 0.2 in a line (Hägele et al. 2024, arXiv:2405.18392)
_FORMAT = "docs/scaling_laws.md describes the file"
# msgspec's messages speak of JSON.
_TERMS = (
    ("Object contains unknown field", "unknown key"),
    ("Object missing required field", "missing key"),
    ("Object", "Table"),
    ("`object", "`table"),
    ("`array", "`list"),
    (" | null", ""),
    ("`null`", "nothing"),
    ("$.", ""),
)
_OURS = ("seed", "run_name", "checkpoint_dir", "max_tokens", "max_steps", "num_epochs", "max_lr")

DATA = "data/python_stdlib_512"  # the embedded corpus in a vocabulary of 512 ids
# The built-in families, on these data.
FAMILIES = {path.stem: path for path in sorted(Path(__file__).parent.glob("*-tiny.toml"))}


class Tokens(int):
    """A number of tokens; the file may have it as text, such as "250k"."""


_Lengths = Annotated[tuple[Tokens, ...], Meta(min_length=1)]
_Seed = Annotated[int, Meta(ge=0)]
_Factor = Annotated[float, Meta(gt=0, lt=1e6)]
_Name = Annotated[str, Meta(pattern=r"^[\w.+-]+$")]
_Table = dict[str, Any]  # of settings; that of a size may have `tokens` too


class RateRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """max_lr = `max_lr` x (n_embd / `n_embd`) ^ -`exponent` x (tokens / `tokens`) ^ -`tokens_exponent`.

    A muon_lr changes by the same factor. Longer runs need lower rates: Bjorck et al. 2024, arXiv:2409.19913.
    """

    n_embd: Annotated[int, Meta(ge=1)]
    max_lr: Annotated[float, Meta(gt=0, lt=1e9)]
    exponent: Annotated[float, Meta(ge=0, lt=1e9)]
    tokens: Tokens | None = None
    tokens_exponent: Annotated[float, Meta(ge=0, le=2)] | None = None
    # Of the rule's rate, that the checked rungs are also trained with.
    factors: Annotated[tuple[_Factor, ...], Meta(min_length=1)] = (0.5, 2.0)
    check: tuple[str, ...] | None = None  # names of the checked rungs; default the first and last

    def __post_init__(self) -> None:
        """Raise ValueError."""
        _require_distinct("factors", self.factors)
        if 1 in self.factors:
            raise ValueError("factors: 1 is the rate of the rule itself; leave it out")
        if (self.tokens is None) != (self.tokens_exponent is None):
            raise ValueError("tokens and tokens_exponent go together; give both or neither")

    def factor(self, n_embd: int, tokens: int) -> float:
        """Return the rate at a width and a number of tokens, relative to the base."""
        factor = float((n_embd / self.n_embd) ** -self.exponent)
        if self.tokens and self.tokens_exponent:
            factor *= (tokens / self.tokens) ** -self.tokens_exponent
        return factor


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seeds: Annotated[tuple[_Seed, ...], Meta(min_length=1)]
    sizes: Annotated[dict[_Name, _Table], Meta(min_length=1)]
    tokens: _Lengths | None = None  # of the sizes that have none of their own
    settings: _Table = {}
    top: _Table | None = None
    rate: RateRule | None = None


@dataclass(frozen=True)
class Family:
    """What the file of a ladder says."""

    file: str  # as it was given, or the family's name
    name: str
    out: Path  # folder of its runs
    seeds: tuple[int, ...]
    rungs: Mapping[str, dict[str, Any]]  # settings by name, in the order of the file; not the top
    top: tuple[str, dict[str, Any]] | None
    rate: RateRule | None
    trunks: bool = False  # a size's longest run is the trunk that its others branch from

    def rung_runs(self) -> list[SeedRun]:
        """Return the runs to fit.

        Raises: ConfigError.
        """
        return self._runs(self.rungs)

    def top_runs(self) -> list[SeedRun]:
        """Return the runs of the top rung, [] if the file has none.

        Raises: ConfigError.
        """
        return self._runs(dict([self.top])) if self.top else []

    def rate_runs(self) -> dict[str, dict[float, list[SeedRun]]]:
        """Return {checked rung: {factor of the rule's rate: its runs}}.

        Raises: ConfigError.
        """
        if self.rate is None:
            return {}
        return {
            name: {
                factor: self._runs({f"{name}_x{factor:g}": self.rungs[name]}, factor)
                for factor in self.rate.factors
            }
            for name in self.rate.check or ()
        }

    def branches(self, runs: Sequence[SeedRun]) -> list[tuple[SeedRun, SeedRun, int]]:
        """Return (run, its trunk, the step at which it branches) of each run that is no trunk.

        A branch has the bits of a run of its own settings: up to there these are the trunk's, but for the length.
        """
        found = []
        for run in runs if self.trunks else ():
            size = run.setting.rpartition("-")[0]
            of_size = [
                o for o in runs if (o.setting.rpartition("-")[0], o.seed) == (size, run.seed)
            ]
            trunk, steps = max(of_size, key=_steps_of), _steps_of(run)
            if trunk is not run:
                decay = max(1, round(run.request.config.optim.wsd_decay * steps))
                found.append((run, trunk, steps - decay))
        return found

    def _runs(self, rungs: Mapping[str, dict[str, Any]], factor: float = 1.0) -> list[SeedRun]:
        settings = {name: Setting(self.request(own, factor)) for name, own in rungs.items()}
        return plan_runs(settings, seeds=self.seeds, out=self.out)

    def request(self, values: dict[str, Any], factor: float) -> RunRequest:
        """Return the request of a run with these settings, at the rate of the rule times a factor."""
        request = make_request(read_values(values))
        optim = request.config.optim
        rates = {"max_lr": optim.max_lr, "muon_lr": optim.muon_lr}
        if self.rate is not None:
            factor *= self.rate.factor(request.config.model.n_embd, values["max_tokens"])
            rates["max_lr"] = self.rate.max_lr
        # Chosen, so that no rung takes those that suit its own length.
        batch = request.config.batch.total_batch_size
        fixed: dict[str, Any] = {
            k: float(f"{rate * factor:.6g}") for k, rate in rates.items() if rate is not None
        }
        if self.trunks:
            fixed |= self._of_trunk(request, values["max_tokens"] // batch, batch)
        return request.with_settings(total_batch_size=batch, **fixed)

    def _of_trunk(self, request: RunRequest, steps: int, batch: int) -> dict[str, Any]:
        """Return the schedule of a run of so many steps: in all lengths the same until the rate falls.

        Raises: ConfigError if that cannot be.
        """
        chosen, optim = request.chosen, request.config.optim
        if "lr_schedule" in chosen and optim.lr_schedule != "wsd":
            raise ConfigError(f"--trunks: lr_schedule {optim.lr_schedule}; a trunk needs wsd")
        if self.rate is not None and self.rate.tokens_exponent:
            raise ConfigError(
                "--trunks: [rate] tokens_exponent gives each length its own rate, and a trunk has one; leave it out"
            )
        shortest = min(own["max_tokens"] for own in self.rungs.values()) // batch
        warmup = optim.warmup_steps if "warmup_steps" in chosen else default_warmup(shortest)
        decay = max(1, round((optim.wsd_decay if "wsd_decay" in chosen else _DECAY) * steps))
        if steps - decay < max(1, warmup or 0):
            raise ConfigError(
                f"--trunks: a run of {steps} steps has no constant rate to branch from"
            )
        shape = optim.wsd_shape if "wsd_shape" in chosen else "sqrt"
        return {"lr_schedule": "wsd", "wsd_shape": shape, "wsd_decay": decay / steps} | {
            "warmup_steps": warmup
        }


def _steps_of(run: SeedRun) -> int:
    config = run.request.config
    assert config.length.max_tokens is not None
    return config.length.max_tokens // config.batch.total_batch_size


def read_family(what: str, out: Path | None = None, *, trunks: bool = False) -> Family:
    """Return the ladder of a TOML file, or a built-in family by its name; `out`: the folder of its runs.

    Raises: ConfigError naming the file and what is wrong with it.
    """
    path = FAMILIES.get(what) or paths.from_working_directory(Path(what))
    if path.suffix != ".toml":
        hint = fmt.did_you_mean(what, FAMILIES, f"or {' or '.join(FAMILIES)}")
        raise ConfigError(f"{what}: not a ladder: give a .toml file of sizes and tokens, {hint}")
    try:
        text = read_regular(path, at_most=_AT_MOST, follow=True).decode("utf-8-sig")
        return _family(what, path.stem, tomllib.loads(text), out, trunks)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError, GPT2LabError) as error:  # not UTF-8, not TOML, not a ladder
        raise ConfigError(f"{path}: {error}") from None


def _family(file: str, name: str, table: dict[str, Any], out: Path | None, trunks: bool) -> Family:
    found = _read(table, _File, "")
    _require_distinct("seeds", found.seeds)
    shared = _settings("settings", found.settings)
    rungs: dict[str, _Table] = {}
    for size, own in found.sizes.items():
        where, lengths = "tokens", found.tokens
        if "tokens" in own or lengths is None:
            where = f"[sizes.{size}] tokens"
            lengths = _read(own.pop("tokens", None), _Lengths, f"{where}: ")
        _require_distinct(where, lengths)
        values = shared | _settings(f"sizes.{size}", own)
        named = {_rung_name(size, n): values | {"max_tokens": n} for n in lengths}
        if len(named) < len(lengths):
            raise ConfigError(f"{where}: two of them are one in six digits; give other numbers")
        rungs |= named
    top = None
    if found.top is not None:
        tokens = _read(found.top.pop("tokens", None), Tokens, "[top] tokens: ")
        values = shared | _settings("top", found.top) | {"max_tokens": tokens}
        top = (_rung_name("top", tokens), values)
        if top[0] in rungs:
            raise ConfigError("[sizes.top]: top is the name of the top rung; choose another")
    rate = found.rate
    if rate is None and "max_lr" not in shared:
        raise ConfigError("no [rate] and no max_lr in [settings]: give n_embd, max_lr and exponent")
    if rate is not None:
        names = list(rungs)
        check = (names[0], names[-1]) if rate.check is None else rate.check
        if not rungs.keys() >= set(check):
            raise ConfigError(f"[rate] check: give a list of rungs, out of {', '.join(names)}")
        rate = msgspec.structs.replace(rate, check=tuple(dict.fromkeys(check)))
    name += "_trunks" * trunks
    folder = paths.from_working_directory(out) if out else paths.runs_folder(None) / name
    return Family(file, name, folder, found.seeds, rungs, top, rate, trunks)


def _read(value: Any, kind: Any, where: str) -> Any:
    """Return what a part of the file means, as msgspec reads its type.

    Raises: ConfigError.
    """
    try:
        return msgspec.convert(value, kind, dec_hook=_read_tokens)
    except msgspec.ValidationError as error:
        said = str(error)
        for of_json, of_toml in _TERMS:
            said = said.replace(of_json, of_toml)
        hint = _FORMAT
        if key := re.search(r"unknown key `(.*?)`", said):
            known = _File.__struct_fields__ + RateRule.__struct_fields__
            hint = fmt.did_you_mean(key[1], known, _FORMAT)
        raise ConfigError(f"{where}{said}; {hint}") from None


def _read_tokens(kind: type, value: Any) -> Tokens:
    number = fmt.parse_count(value) if isinstance(value, str) else value
    if not isinstance(number, int) or isinstance(number, bool) or not 0 < number < 10**15:
        raise ValueError(f"{value!r} is not a number of tokens such as 250000 or '250k'")
    return Tokens(number)


def _require_distinct(name: str, values: Sequence[Any]) -> None:
    if len(set(values)) < len(values):
        raise ValueError(f"{name}: a value is duplicated")


def _rung_name(size: str, tokens: int) -> str:
    return f"{size}-{fmt.count(tokens, digits=6)}"


def _settings(where: str, values: dict[str, Any]) -> dict[str, Any]:
    ours = sorted(set(values) & set(_OURS) - ({"max_lr"} if where == "settings" else set()))
    if ours:
        raise ConfigError(f"[{where}] {ours[0]}: set by the ladder itself")
    try:
        read_values(values)
    except GPT2LabError as error:
        raise ConfigError(f"[{where}] {error}") from None
    return values
