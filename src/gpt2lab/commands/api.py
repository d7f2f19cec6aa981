"""What `import gpt2lab` offers. Torch is imported when something is computed, not before."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpt2lab import fmt, paths
from gpt2lab.config.schema import Dtype, ModelConfig, RecipeName
from gpt2lab.config.settings import to_flat, wrong_types
from gpt2lab.config.settings_file import make_request, read_file, read_values
from gpt2lab.errors import ConfigError, raise_problems
from gpt2lab.evaluation.completion import Completer, SamplingParams, check_sampling
from gpt2lab.runs import history
from gpt2lab.runs.target import find_run, is_run

if TYPE_CHECKING:
    from torch import Tensor

    from gpt2lab.model.gpt import GPT
    from gpt2lab.tokenizers.interface import Tokenizer


class LanguageModel:
    """A trained model with its tokenizer: texts in, texts and numbers out."""

    def __init__(self, completer: Completer) -> None:
        self._completer = completer
        self.name = completer.target.name
        self.module: GPT = completer.model  # a torch.nn.Module: ids (B, T) -> logits (B, T, V)
        self.tokenizer: Tokenizer = completer.tokenizer
        self.config: ModelConfig = completer.model.config

    def __repr__(self) -> str:
        parameters = sum(parameter.numel() for parameter in self.module.parameters())
        return f"<LanguageModel {self.name}: {parameters:,} parameters>"

    def generate(
        self,
        text: str = "",
        *,
        max_new_tokens: int = SamplingParams.max_new_tokens,
        temperature: float = SamplingParams.temperature,
        top_k: int = SamplingParams.top_k,
        top_p: float = SamplingParams.top_p,
        seed: int = SamplingParams.seed,
    ) -> str:
        """Return `text` and its continuation, one string; the same seed gives the same continuation.

        Raises: ConfigError if the text is longer than the context or no text, or a setting cannot work.
        """
        style = SamplingParams(max_new_tokens, temperature, top_k, top_p, seed)
        _check_flags(SamplingParams, dataclasses.asdict(style), "generate")
        check_sampling(style)
        completer = copy.copy(self._completer)  # another thread may generate with other settings
        completer.style = style
        (found,) = completer.complete(self._encode(text))
        return text + found.text

    def logits(self, text: str) -> Tensor:
        """Return (T, ids of the tokenizer) float32: row t scores the token after the text's first t + 1 tokens.

        Raises: ConfigError if the text is empty, longer than the context or no text.
        """
        import torch

        ids = self._some_ids(text, "logits")
        with torch.no_grad(), self._completer.strategy.autocast():
            scores = self.module(torch.tensor([ids], device=self._device))[0]
        return scores[:, : self.config.id_limit].float()

    def loss(self, text: str) -> float:
        """Return the mean loss in nats/token of a text that follows an end of text, as a document does in training.

        Raises: ConfigError if the text is empty, longer than the context or no text.
        """
        import torch

        ids = self._some_ids(text, "loss")
        row = torch.tensor([[self.tokenizer.end_of_text, *ids]], device=self._device)
        with torch.inference_mode(), self._completer.strategy.autocast():
            return float(self.module(row[:, :-1], row[:, 1:])) / len(ids)

    def _encode(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise ConfigError(f"text {text!r:.60} is not a string; call once for each text")
        return self._completer.encode(text, "the text")

    def _some_ids(self, text: str, what: str) -> list[int]:
        if ids := self._encode(text):
            return ids
        raise ConfigError(f"{what} of an empty text: give at least one token")

    @property
    def _device(self) -> Any:
        return next(self.module.parameters()).device


def load(
    name: str | Path,
    *,
    checkpoint_dir: str | Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    dtype: Dtype = "fp32",
) -> LanguageModel:
    """Load a run (its newest valid checkpoint), a checkpoint's or Hugging Face folder, or `hf:NAME` from the Hub.

    Raises: CheckpointError, ConfigError, DataError.
    """
    from gpt2lab.commands.sample import Sample

    _check_flags(Sample, {"device": device, "dtype": dtype}, "load")
    folder = paths.runs_folder(_path(checkpoint_dir))
    with _keeping_kernels():
        return LanguageModel(
            Completer(
                str(name), checkpoint_dir=folder, device=device, dtype=dtype, style=SamplingParams()
            )
        )


@contextlib.contextmanager
def _keeping_kernels() -> Iterator[None]:
    """Leave torch's choice of deterministic kernels, which is the whole process's, as the caller had it."""
    torch = sys.modules.get("torch")
    mode = torch.get_deterministic_debug_mode() if torch else 0
    try:
        yield
    finally:
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_deterministic_debug_mode(mode)


# Of the events of `Run.metrics`.
_KINDS = ("step", "eval", "hellaswag", "core", "sample", "checkpoint")


@dataclass(frozen=True)
class Run:
    """A run's folder."""

    folder: Path

    @property
    def name(self) -> str:
        """The run's name."""
        return self.folder.name

    @property
    def config(self) -> dict[str, Any]:
        """All settings by the names of their flags."""
        return to_flat(history.read_config(self.folder))

    def metrics(self, kind: str = "step") -> list[dict[str, Any]]:
        """Return the events of a kind in order of steps: `step`, `eval`, `hellaswag`, `core`, `sample`, `checkpoint`.

        Steps that a resume took again are there once, as they were taken last.

        Raises: ConfigError for a kind that does not exist.
        """
        log = history.read_log(self.folder)
        events = log.current_steps() if kind == "step" else log.current(kind).values()
        found = [dict(event) for event in events]
        if not found and kind not in _KINDS:
            raise ConfigError(f"metrics kind {kind!r}: {', '.join(_KINDS[:-1])} or {_KINDS[-1]}")
        return found

    def load(self) -> LanguageModel:
        """Load the newest valid checkpoint."""
        return load(self.folder)


def open_run(name: str | Path, *, checkpoint_dir: str | Path | None = None) -> Run:
    """Return a run by its name or folder. Reads nothing until asked.

    Raises: ConfigError if there is none.
    """
    folder = find_run(str(name), _path(checkpoint_dir))
    if not is_run(folder):
        raise ConfigError(f"{name}: a folder without a log or checkpoints is no run")
    return Run(folder)


def prepare(source: str | Path, out: str | Path | None = None, **flags: Any) -> Path:
    """Tokenize a source of text into shards and return their folder; `flags` are those of `gpt2lab prepare`.

    Raises: DataError, ConfigError.
    """
    from gpt2lab.commands import prepare_data

    target = prepare_data.PrepareData
    _check_flags(target, {**flags, "source": source, "out": out}, "prepare")
    return prepare_data.prepare(target(str(source), _path(out), **flags))


def train(
    config: str | Path | dict[str, Any] | None = None,
    *,
    resume: str | Path | None = None,
    branch_from: str | Path | None = None,
    cooldown: str | None = None,
    allow_change: str | None = None,
    **settings: Any,
) -> Run:
    """Train a run in this process, or continue one, and return it when it is complete or has stopped and saved.

    `config`: a dict of settings, or a TOML or JSON file, such as a run's config.json; `settings` count above it. With
    `instructions` it is fine-tuned. Several GPUs: `gpt2lab train --gpus N --config FILE`.

    Raises: GPT2LabError; ConfigError and DataError before anything is written.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "train works in the main thread only, which hears of Ctrl+C; elsewhere start `gpt2lab train` as a process"
        )
    from gpt2lab.commands.branch import as_branch
    from gpt2lab.commands.command_line import Actions, check_allowed
    from gpt2lab.commands.train import recipe_named, run
    from gpt2lab.planner.auto import TrainingPlanner

    resume = str(resume) if isinstance(resume, Path) else resume
    branch_from = str(branch_from) if isinstance(branch_from, Path) else branch_from
    how = {"resume": resume, "allow_change": allow_change}
    how |= {"branch_from": branch_from, "cooldown": cooldown}
    _check_flags(Actions, how, "train")
    check_allowed(allow_change, resumes=bool(resume or branch_from))
    base, path = (config, None) if isinstance(config, dict) else ({}, _path(config))
    tunes = {**base, **settings}.get("instructions")
    recipe: RecipeName = "finetune" if tunes else "pretrain"
    values = read_values(settings, recipe)
    file = read_values(base, recipe, typed=values)
    if path is not None:
        file = read_file(paths.from_working_directory(path), recipe, typed=values)
    request = make_request(
        values, file=file, recipe=recipe, resume=resume, allow_change=allow_change
    )
    request = as_branch(request, branch_from, cooldown)
    with _keeping_kernels():
        run_dir = run(request, recipe_named(recipe), planner=TrainingPlanner())
    assert run_dir is not None  # the only process
    return Run(run_dir)


def estimate(**flags: Any) -> dict[str, Any]:
    """Predict a run: time, memory, cost and loss, as `gpt2lab estimate --json` prints them; `flags` are its flags.

    Raises: ConfigError; NoSourceError if there is nothing to predict from.
    """
    from gpt2lab.commands.estimate_time import find_answer
    from gpt2lab.planner.request import EstimateRequest

    given = {name: _as_typed(name, value) for name, value in flags.items()}
    _check_flags(EstimateRequest, given, "estimate")
    document, _, _ = find_answer(EstimateRequest(**given))
    return document


def _as_typed(name: str, value: Any) -> Any:
    """Return a flag of the planner as its command line has it."""
    if name in ("tokens", "steps", "num_samples") and isinstance(value, int | float):
        return str(value)
    if name in ("data_dir", "data_weights_at"):
        words = [value] if isinstance(value, str | Path) else value or ()
        return tuple(map(str, words)) if isinstance(words, list | tuple) else value
    is_path = name in ("checkpoint_dir", "report") and isinstance(value, str)
    return Path(value) if is_path else value


def _path(value: str | Path | None) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | Path):
        raise ConfigError(f"{value!r:.60} is no path of a file or folder")
    return Path(value)


def _check_flags(target: type, flags: dict[str, Any], verb: str) -> None:
    """Reject what is no flag of a verb, or has another type than its flag."""
    known = {field.name for field in dataclasses.fields(target)}
    for name in sorted(flags.keys() - known):
        hint = fmt.did_you_mean(name, known, f"gpt2lab {verb} --help-all lists them")
        raise ConfigError(f"{verb} takes no {name}: {hint}")
    plain = {
        name: str(v) if isinstance(v, Path) else list(v) if isinstance(v, tuple) else v
        for name, v in flags.items()
    }
    raise_problems(wrong_types(plain, target).values())
