"""Settings in a file: `--config FILE` reads TOML or JSON, such as a run's own config.json; `--save_config` writes one.

The settings are flat, by the names of their flags. No torch.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gpt2lab import fmt
from gpt2lab.config.derived import fitting_rows
from gpt2lab.config.other_programs import answer, answer_value
from gpt2lab.config.presets import OF_OPTIMIZERS, PRESETS, for_length, preset
from gpt2lab.config.request import FOLLOWS, RunRequest, chosen_in, with_full_paths
from gpt2lab.config.schema import LENGTHS, Config, ModelName, RecipeName, TuningConfig
from gpt2lab.config.settings import LEAVES, as_recorded, override, to_flat, wrong_types
from gpt2lab.errors import ConfigError, raise_problems, system_errors_as
from gpt2lab.files import read_regular, replace_durably

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROGRAMS = {"pretrain": "gpt2lab train", "finetune": "gpt2lab finetune"}
TUNING = frozenset(TuningConfig.__dataclass_fields__)
OF_SHARDS = frozenset({"data_dir", "data_weights_at", "max_source_epochs"})
_UNUSED = {"pretrain": TUNING, "finetune": OF_SHARDS}
_AT_MOST = 2**20  # bytes of a file


def make_request(
    typed: Mapping[str, Any],
    *,
    file: Mapping[str, Any] | None = None,
    recipe: RecipeName = "pretrain",
    resume: str | None = None,
    allow_change: str | None = None,
) -> RunRequest:
    """Return the request for given settings: typed ones override the file, the file overrides the preset.

    `typed`, `file`: by the names of flags, paths absolute, as `as_recorded` and `read_file` return them.
    `allow_change`: names separated by commas.

    Raises: ConfigError on a name that no setting has.
    """
    file = _of_other_data(file or {}, typed)
    given = {**file, **typed}
    config = preset(
        file.get("model", typed.get("model", Config().model.model)),
        optimizer=given.get("optimizer"),
    )
    for values in (file, typed):
        config = _on_preset(values, config, kept=file)
    allowed = {name.strip().lstrip("-") for name in (allow_change or "").split(",")} - {""}
    if allowed & set(LENGTHS):
        allowed |= set(LENGTHS)
    return RunRequest(
        config=with_full_paths(config),
        chosen=frozenset(given),
        typed=frozenset(typed),
        recipe=recipe,
        resume=resume,
        allowed_changes=frozenset(allowed),
    )


def _on_preset(values: Mapping[str, Any], base: Config, kept: Collection[str]) -> Config:
    """Return `base` with given settings; another preset than that of `base` counts as giving each of its settings.

    What only the other preset had is at its default again, unless it is `kept`.
    """
    if "model" in values and values["model"] != base.model.model:
        left = PRESETS[base.model.model].keys() - PRESETS[values["model"]].keys() - set(kept)
        plain = to_flat(Config())
        base = override(base, {name: plain[name] for name in left})
        base = preset(values["model"], base, optimizer=values.get("optimizer"))
    if any(values.get(name) is not None for name in LENGTHS):  # one setting in three units
        values = dict.fromkeys(LENGTHS) | dict(values)
    return override(base, dict(values))


def _of_other_data(file: Mapping[str, Any], typed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drop the vocabulary of a run's settings if another start has other data: it follows from their tokenizer."""
    own = file.get("model")
    model = typed.get("model", own)
    # Another preset brings its own data, or takes back those of the file's.
    is_other = model != own and ("data_dir" not in file or "data_dir" in PRESETS.get(model, ()))
    if "num_tokens" not in file or not (is_other or "data_dir" in typed):
        return file
    is_fitted = file.get("vocab_size") == fitting_rows(file["num_tokens"])
    dropped = {"num_tokens", "vocab_size"} if is_fitted else {"num_tokens"}
    return {name: value for name, value in file.items() if name not in dropped}


def read_file(
    path: Path, recipe: RecipeName, *, typed: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return {setting: value} of a settings file, for a start of that recipe; paths are relative to the working
    directory, as typed ones are.

    A run's own config.json, in the run's folder, does not give its name to another run, nor what follows from its own
    model, optimizer or length where others are `typed`.

    Raises: ConfigError naming the file, and every line that cannot be used.
    """
    text = _read_text(path)
    values = _with_none(_parse(path, text))
    if problems := [_with_line(name, text, what) for name, what in _problems(values).items()]:
        raise ConfigError(f"{path}: {'; '.join(problems)}")
    if values.get("run_name") == path.parent.name:
        del values["run_name"]
    return _of_recipe(
        as_recorded(_without_what_follows(values, typed or {})), recipe, where=f"{path}: "
    )


def read_values(
    values: dict[str, Any],
    recipe: RecipeName = "pretrain",
    *,
    typed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return settings that a program gives for a start of that recipe, as `read_file` does those of a file.

    Raises: ConfigError naming every one that cannot be used.
    """
    plain = _with_none({str(name): _plain(value) for name, value in values.items()})
    raise_problems(_problems(plain).values())
    return _of_recipe(as_recorded(_without_what_follows(plain, typed or {})), recipe)


def _plain(value: Any) -> Any:
    """Return a value of a program as a file has it: a path as text, a number of numpy as one of Python."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _without_what_follows(values: Mapping[str, Any], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file without its record, and without unchosen values that follow from peak or length.

    Nor, where another model, optimizer or length is typed, with those that follow from the file's own.
    """
    follows, own = FOLLOWS, values.get("model", Config().model.model)
    if typed.get("model", own) != own:
        follows |= PRESETS[own].keys()
    optimizer = values.get("optimizer")
    if typed.get("optimizer", optimizer) != optimizer:
        follows |= PRESETS[own].keys() & OF_OPTIMIZERS
    if typed.keys() & {*LENGTHS, "data_dir", "model", "optimizer"}:
        follows |= _fitted(values, own, str(optimizer))
    dropped = (follows - chosen_in(values)) | {"chosen"}
    return {name: value for name, value in values.items() if name not in dropped}


def _fitted(values: Mapping[str, Any], own: ModelName, optimizer: str) -> set[str]:
    """Return which settings have the batch and rates that a run's length gave them; an edited one has another.

    Of a length in epochs only the data tell the tokens: there rates count as edited if their floor does not follow.
    """
    tokens = values.get("max_tokens")
    fitted = for_length(own, optimizer, tokens or 1.0)
    if values.get("max_steps"):
        plain = to_flat(preset(own, optimizer=optimizer))
        fitted = {name: plain[name] for name in fitted}
    elif not tokens:
        is_edited = "min_lr" in chosen_in(values).difference(values.get("chosen", ()))
        fitted = {n: values.get(n) for n in fitted if not (is_edited and n.endswith("_lr"))}
    return {name for name, value in fitted.items() if values.get(name) == value}


def _with_none(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a file with `None` as on the command line: TOML has no null."""
    optional = {name for name, (_, leaf) in LEAVES.items() if "None" in str(leaf.type)}
    return {n: None if v == "None" and n in optional else v for n, v in values.items()}


def _problems(values: dict[str, Any]) -> dict[str, str]:
    unknown = {
        n: _why_unknown(n, value)
        for n, value in values.items()
        if n not in LEAVES and n != "chosen"
    }
    wrong = wrong_types(values)
    chosen = values.get("chosen", [])
    if not (isinstance(chosen, list) and all(isinstance(name, str) for name in chosen)):
        wrong["chosen"] = "chosen must be a list of names of settings"
    for name in wrong:
        if (here := answer_value(name, values[name])) is not None:
            wrong[name] = f"{name} {json.dumps(values[name])}: {here}"
    return unknown | wrong


def check_recipe(values: Mapping[str, Any], recipe: RecipeName, *, where: str = "") -> None:
    """Reject a setting of the other recipe that has not its default: it would have no effect.

    Raises: ConfigError.
    """
    plain, kind, owner = to_flat(Config()), "fine-tuning", PROGRAMS["finetune"]
    if recipe == "finetune":
        kind, owner = "pretraining", PROGRAMS["pretrain"]
    for name in sorted(_UNUSED[recipe] & values.keys()):
        if values[name] != plain[name]:
            raise ConfigError(f"{where}--{name} is for {kind}, {owner}; leave it out here")


def _of_recipe(values: dict[str, Any], recipe: RecipeName, where: str = "") -> dict[str, Any]:
    """Leave out the settings of the other recipe, which a run's config.json holds too, unused."""
    # A run records nearly all settings, and so does --save_config; a person gives few.
    if recipe == "pretrain" or len(values) < len(LEAVES) / 2:
        check_recipe(values, recipe, where=where)
    return {name: value for name, value in values.items() if name not in _UNUSED[recipe]}


def _read_text(path: Path) -> str:
    try:
        return read_regular(path, at_most=_AT_MOST, follow=True).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: not a text file; give a .toml or .json file") from None


def _parse(path: Path, text: str) -> dict[str, Any]:
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(
            f"--config {path}: give a .toml or .json file, as --save_config writes it"
        )
    try:
        if path.suffix == ".toml":
            return tomllib.loads(text)
        values = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # of both formats, with the line; or of nesting
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not one JSON object of settings")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} is there twice")
    return values


def _with_line(name: str, text: str, what: str) -> str:
    pattern = rf'^[ \t{{,\[]*["\']?{re.escape(name)}["\']?[ \t]*[=:\]]'
    found = re.search(pattern, text, flags=re.M)
    line = 1 + text.count("\n", 0, found.start()) if found else None
    return f"line {line}: {what}" if line else what


def _why_unknown(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"[{name}] is a table; settings stand flat, by the names of their flags"
    if (here := answer(name)) is not None:
        return f"unknown setting {name}: {here}"
    known = (one for one in LEAVES if one != "num_tokens")
    hint = fmt.did_you_mean(name, known, "gpt2lab train --help-all lists them")
    return f"unknown setting {name}: {hint}"


def write_file(path: Path, config: Config, *, leave_out: frozenset[str]) -> None:
    """Write all settings that have a value to a new file, as TOML or JSON by its name; its folder must be there.

    Raises: ConfigError if there is a file already, or none can be written.
    """
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(f"--save_config {path}: give a name that ends with .toml or .json")
    if path.exists():
        raise ConfigError(f"--save_config {path}: exists already; choose another name")
    unused = _UNUSED["pretrain" if config.tuning.instructions is None else "finetune"]
    flat = {
        name: value
        for name, value in to_flat(config).items()
        if value is not None and name not in unused | leave_out
    }
    text = _as_toml(flat) if path.suffix == ".toml" else json.dumps(flat, indent=1) + "\n"
    with system_errors_as(ConfigError, f"--save_config {path}"):
        replace_durably(path, text)


def _as_toml(flat: dict[str, Any]) -> str:
    """Write flat values in their order, each section under a comment; JSON's texts and numbers are TOML's too."""
    lines: list[str] = []
    section = None
    for name, value in flat.items():
        if LEAVES[name][0] != section:
            section = LEAVES[name][0]
            lines += ["", f"# {section}"] if lines else [f"# {section}"]
        lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"
