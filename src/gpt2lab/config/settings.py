"""Settings by the names that people type: flat values, their resume policy, and what cannot work."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from gpt2lab import fmt, paths
from gpt2lab.config.mixture import normal_words, read_sources
from gpt2lab.config.schema import LENGTHS, TRACKERS, Config, ModelConfig, Policy
from gpt2lab.errors import ConfigError, raise_problems
from gpt2lab.files import is_file_name, is_number

# Each flag's name: (name of its section, its field).
LEAVES: dict[str, tuple[str, dataclasses.Field[Any]]] = {
    leaf.name: (section.name, leaf)
    for section in fields(Config)
    for leaf in fields(section.default_factory)  # type: ignore[arg-type]
}
# Two models have the same architecture if these settings agree.
ARCHITECTURE = tuple(
    leaf.name for leaf in fields(ModelConfig) if leaf.metadata["policy"] == "fixed"
)
SIZES = ("n_layer", "n_head", "n_embd", "context_length", "vocab_size")
# Those in which a model may differ from GPT-2.
OPTIONS = tuple(name for name in ARCHITECTURE if name not in (*SIZES, "num_tokens"))


def options_of(model: ModelConfig) -> str:
    """Name the options in which a model is not GPT-2, e.g. `positions rotary`; empty for GPT-2."""
    plain = ModelConfig()
    return ", ".join(
        f"{name} {getattr(model, name)}"
        for name in OPTIONS
        if getattr(model, name) != getattr(plain, name)
    )


def policy_of(name: str, config: Config) -> Policy:
    """Return the resume policy of a flag."""
    known = LEAVES[name][1].metadata
    return "guarded" if known.get("draws_dropout") and config.model.dropout > 0 else known["policy"]


def is_path(name: str) -> bool:
    """Tell whether a flag names files or folders."""
    return name == "data_dir" or "Path" in str(LEAVES[name][1].type)


def is_list(name: str) -> bool:
    """Tell whether a flag takes several words."""
    return "tuple" in str(LEAVES[name][1].type)


def resolved(name: str, value: Any, resolve: Callable[[Path], Path]) -> Any:
    """Return the flat value of a path or of several words as a run records it, its paths through `resolve`.

    Raises: ConfigError if the words cannot be read.
    """
    if value is None:
        return None
    if is_list(name):
        return _to_word(normal_words(name, _to_words(value), resolve))
    return str(resolve(Path(value)))


def _to_words(value: Any) -> tuple[str, ...]:
    """Return what a JSON value of a setting of several words means: null, the one word, or a list."""
    if value is None:
        return ()
    return (str(value),) if isinstance(value, str | Path) else tuple(map(str, value))


def _to_word(words: tuple[str, ...]) -> str | list[str] | None:
    return None if not words else words[0] if len(words) == 1 else list(words)


def data_name(config: Config) -> str:
    """Name the shards or conversations of a run, without the folder that they lie in."""
    source = config.tuning.instructions
    if source is None:
        return "+".join(read_sources(config.data).names)
    return source if source.startswith("hf:") else Path(source).name


def to_flat(config: Config) -> dict[str, Any]:
    """Return {flag: JSON value} in declaration order."""
    flat = {}
    for name, (section, _) in LEAVES.items():
        value = getattr(getattr(config, section), name)
        if is_list(name):
            value = _to_word(value)
        flat[name] = str(value) if isinstance(value, Path) else value
    return flat


def record(config: Config, chosen: Iterable[str]) -> dict[str, Any]:
    """Return the settings as a run's files hold them: flat, with the names of those that a person chose."""
    return {**to_flat(config), "chosen": sorted(chosen)}


def override(config: Config, values: dict[str, Any]) -> Config:
    """Return `config` with flat values replaced.

    Raises: ConfigError on a name that no setting has.
    """
    unknown = sorted(set(values) - set(LEAVES))
    if unknown:
        raise ConfigError(
            f"unknown settings {', '.join(unknown)}: written by another version of gpt2lab?"
        )
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if is_list(name):
            value = _to_words(value)
        elif is_path(name) and value is not None:
            value = Path(value)
        by_section.setdefault(LEAVES[name][0], {})[name] = value
    sections = {n: dataclasses.replace(getattr(config, n), **v) for n, v in by_section.items()}
    return dataclasses.replace(config, **sections)


def _no_folder_name(name: str) -> str:
    if any("\udc80" <= letter <= "\udcff" for letter in name):
        return f"run_name {name!r} is not UTF-8, or the locale hides it; type another, or set LC_ALL=C.UTF-8"
    return (
        f"run_name {name!r} must be a plain folder name: printable, without a slash, not beginning "
        "with . or -; put the folder above it in --checkpoint_dir"
    )


def wrong_types(values: dict[str, Any], target: type | None = None) -> dict[str, str]:
    """Return {name: problem} of the JSON values of another type than their setting, or than their field in `target`."""
    kinds = TYPES if target is None else get_type_hints(target)
    return {
        name: _wrong(name, value, kinds[name])
        for name, value in values.items()
        if name in kinds
        and not _is_of(value, kinds[name])
        and not (name == "sample_prompt" and isinstance(value, str))  # any text; others name files
    }


def as_recorded(values: dict[str, Any]) -> dict[str, Any]:
    """Return values that a person wrote as a run records them: numbers by type, paths from the working directory.

    Raises: ConfigError if the words of a list cannot be read.
    """
    found = dict(values)
    for name, value in values.items():
        if is_path(name) or is_list(name):
            found[name] = resolved(name, value, paths.from_working_directory)
        elif isinstance(value, int) and not isinstance(value, bool) and TYPES[name] is not int:
            found[name] = float(value) if _is_of(0.5, TYPES[name]) else value
    source = values.get("instructions")
    if source and source != "demo" and not source.startswith("hf:"):
        found["instructions"] = str(paths.from_working_directory(Path(source)))
    return found


def read_settings(values: dict[str, Any]) -> Config:
    """Return the settings that a file holds, as a run wrote them; those that it lacks have their defaults.

    Raises: ConfigError with every value of another type, or every one that cannot work.
    """
    values = {name: value for name, value in values.items() if name != "chosen"}
    raise_problems(wrong_types(values).values())
    config = override(Config(), values)
    raise_problems(find_problems(override(config, {"run_name": None})))  # its folder's name counts
    return config


TYPES: dict[str, Any] = {
    name: kind
    for section in fields(Config)
    for name, kind in get_type_hints(section.default_factory).items()
}


def _is_of(value: Any, kind: Any) -> bool:
    """Tell whether a JSON value is what `to_flat` writes for a setting of a type."""
    if get_origin(kind) in (Union, UnionType):
        return any(_is_of(value, one) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is tuple:
        words = value if isinstance(value, list) else [value]
        return value is None or all(_is_of(word, str) for word in words)
    if kind is float:
        return is_number(value)
    if kind is int:
        return is_number(value) and isinstance(value, int)
    if kind in (str, Path):
        return isinstance(value, str) and _can_name_a_file(value)
    return type(value) is kind  # bool, None


def _can_name_a_file(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _wrong(name: str, value: Any, kind: Any) -> str:
    known = get_args(kind) if get_origin(kind) is Literal else ()
    hint = fmt.did_you_mean(str(value), known)
    return f"{name} {value!r:.60} is not {_type_name(kind)}{'; ' * bool(hint)}{hint}"


def _type_name(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_type_name, get_args(kind)))
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind))
    return {int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}.get(
        kind, "text"
    )


def both_set_length(names: Iterable[str]) -> str:
    """Return the message about several settings, or their flags, that each set the length of a run."""
    return f"{' and '.join(names)} both set the length of the run; give one of them"


def find_problems(config: Config) -> list[str]:
    """List every setting that cannot work, each with its value and the fix."""
    flat, problems = to_flat(config), []
    try:
        read_sources(config.data)
    except ConfigError as error:
        problems.append(str(error))
    for name, (_, leaf) in LEAVES.items():
        value = flat[name]
        least, above, most = (leaf.metadata.get(bound) for bound in ("least", "above", "most"))
        if isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{name} {value} is not a finite number")
        elif value is not None and least is not None and value < least:
            problems.append(f"{name} {value} must be at least {least}")
        elif value is not None and above is not None and value <= above:
            problems.append(f"{name} {value} must be above {above}")
        elif value is not None and most is not None and value > most:
            problems.append(f"{name} {value} must be at most {most}")
    n_embd, n_head, histograms = flat["n_embd"], flat["n_head"], flat["histogram_freq"]
    head_size, rest = divmod(n_embd, n_head) if n_head >= 1 else (0, 0)
    lengths = [name for name in LENGTHS if flat[name] is not None]
    parallel, run_name = flat["parallel"], flat["run_name"]
    rules = {
        f"seed {flat['seed']} must be below 2**32": flat["seed"] >= 2**32,
        f"min_lr {flat['min_lr']} is above max_lr {flat['max_lr']}": (
            flat["min_lr"] is not None and not flat["min_lr"] <= flat["max_lr"]
        ),
        **{
            f"track {name!r} is none of {', '.join(TRACKERS)}": name not in TRACKERS
            for name in config.log.trackers
        },
        **{f"{name} {flat[name]} must be below 1": flat[name] >= 1 for name in ("beta1", "beta2")},
        f"dropout {flat['dropout']} must be in [0, 1)": not 0 <= flat["dropout"] < 1,
        f"wsd_decay {flat['wsd_decay']} must be in (0, 1]": not 0 < flat["wsd_decay"] <= 1,
        f"val_fraction {flat['val_fraction']} must be in (0, 1)": not 0 < flat["val_fraction"] < 1,
        f"n_embd {n_embd} is not a multiple of n_head {n_head}": rest,
        f"positions rotary: n_embd {n_embd} / n_head {n_head} must be even": (
            flat["positions"] == "rotary" and head_size % 2
        ),
        f"positions half_rotary: n_embd {n_embd} / n_head {n_head} must be a multiple of 4": (
            flat["positions"] == "half_rotary" and head_size % 4
        ),
        f"head_lr {flat['head_lr']}: a tied head is the embedding; use --head untied or --embedding_lr": (
            flat["head_lr"] is not None and flat["head"] == "tied"
        ),
        f"histogram_freq {histograms} needs --use_tensorboard, where histograms are shown": (
            histograms > 0 and not flat["use_tensorboard"]
        ),
        f"histogram_freq {histograms} needs full tensors, and with --parallel fsdp no rank has them": (
            histograms > 0 and parallel == "fsdp"
        ),
        both_set_length(lengths): len(lengths) > 1,
        "average_tail: the mean of LoRA's factors is not that of their products; leave one out": (
            flat["average_tail"] and flat["lora_r"]
        ),
        f"lora_r {flat['lora_r']} needs --instructions: adapters are for fine-tuning": (
            flat["lora_r"] > 0 and flat["instructions"] is None
        ),
        "reduce exact sums full gradients, which no rank has under fsdp; use --parallel ddp or zero1": (
            parallel == "fsdp" and flat["reduce"] == "exact"
        ),
        _no_folder_name(str(run_name)): (
            run_name is not None and (not is_file_name(run_name) or run_name[0] in ".-")
        ),
    }
    return problems + [message for message, is_wrong in rules.items() if is_wrong]
