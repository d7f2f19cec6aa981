"""Evaluation while training: validation loss, HellaSwag, CORE, a text sample; each timed, recorded and shown."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

from gpt2lab import fmt
from gpt2lab.checkpoint.store import TrainState
from gpt2lab.config.request import LOWER_RATE
from gpt2lab.errors import DataError, NonFiniteError
from gpt2lab.evaluation.generation import sample_text
from gpt2lab.evaluation.hellaswag import HellaSwag, summarize
from gpt2lab.evaluation.results import Results, file_of_step, write_results
from gpt2lab.evaluation.validation import ValidationLoss
from gpt2lab.model import rng
from gpt2lab.model.gpt import GPT
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.training.components import Components, Session


class Evaluator:
    """The evaluations of one run; a request to stop ends each of them early."""

    def __init__(
        self, components: Components, session: Session, hellaswag: HellaSwag | None
    ) -> None:
        """`hellaswag` None: without items that evaluation is off."""
        self.config, self.run_dir = components.start.config, components.start.run_dir
        self.runtime, self.strategy = components.runtime, components.strategy
        self.model, self.hellaswag = components.model, hellaswag
        self.core = components.start.core
        self.average = components.average
        self.tokenizer = components.start.tokenizer
        # As announced; of conversations only the answers count.
        T, orders = self.config.model.context_length, components.start.val_orders
        of_each = max(1, self.config.eval.val_tokens // len(orders) // T)  # windows of a source
        self.val_tokens = T * sum(min(order.windows_per_epoch, of_each) for order in orders)
        self.validation = components.batches.validation(components.strategy)
        self.prompt_ids = components.batches.prompt_ids
        self.logger, self.control = session.logger, session.control
        self.progress = session.clock.progress

    def step_of(self, state: TrainState) -> str:
        """Name the step just done, as every console line begins."""
        return f"step {state.step}/{self.progress.last_step}"

    def is_possible(self, name: str) -> bool:
        """Tell whether this run can measure `eval`, `hellaswag`, `core` or `sample`; `checkpoint` is no measurement."""
        needs = {"hellaswag": self.hellaswag, "core": self.core, "sample": self.tokenizer}
        return name == "eval" or needs.get(name) is not None

    @contextlib.contextmanager
    def weights(self, state: TrainState, use: str) -> Iterator[GPT]:
        """Yield the model with all its weights; meanwhile the console says what they are used for."""
        announced = self.logger.waiting(f"{self.step_of(state)} | {use}")
        with announced, self.strategy.full_model(self.model) as model:
            yield model

    def record(self, name: str, state: TrainState, began: float, **numbers: Any) -> float:
        """Record what an evaluation measured, and return its seconds since `began`."""
        seconds = time.monotonic() - began
        self.progress.record_event(name, seconds)
        self.logger.event(name, state.step, **numbers, seconds=seconds)
        return seconds

    def measure(self, name: str, state: TrainState) -> TrainState | None:
        """Measure `name` with the current weights; None if a request to stop came before the end.

        Raises: NonFiniteError.
        """
        if name == "eval":
            return self.evaluate(state)
        others = {
            "hellaswag": self.evaluate_hellaswag,
            "core": self.evaluate_core,
            "sample": self.sample,
        }
        return state if others[name](state) else None

    def evaluate(self, state: TrainState) -> TrainState | None:
        """Return the state with the validation loss of the current weights, None if a request to stop came first.

        Raises: NonFiniteError.
        """
        began = time.monotonic()
        # Early stopping may make this the last evaluation.
        may_be_last = state.step == self.progress.last_step or self.is_over(state, more=1)
        with self.weights(state, f"evaluating {self.val_tokens:,} tokens") as model:
            result = self.validation.measure(
                model,
                interrupted=self.control.is_interrupted,
                keep_token_losses=self.config.eval.keep_token_losses and may_be_last,
            )
        if result is None:
            return None
        if not math.isfinite(result.val_loss):
            raise NonFiniteError(
                f"step {state.step}: validation loss {result.val_loss}; nothing of this step was saved. "
                f"Resume from a checkpoint {LOWER_RATE}"
            )
        state = state.with_val_loss(result.val_loss)
        seconds = self.record("eval", state, began, result=result, **result.numbers())
        self.keep(result.results, state.step)
        best = " | best so far" if state.best_step == state.step else ""
        self.logger.say(f"{self.step_of(state)} | {validation_line(result, seconds)}{best}")
        if self.is_over(state):
            self.control.own_reason = "early stopping"
        return state

    def evaluate_average(self, state: TrainState) -> dict[str, float] | None:
        """Return the validation loss of the mean of the last weights, {} without a mean, None if all were to stop."""
        if not (count := self.average.num_steps(state.step)):
            return {}
        began = time.monotonic()
        of = f"mean of the weights after the last {count:,} steps"
        with self.average.in_weights(), self.weights(state, f"{of}: evaluating") as model:
            result = self.validation.measure(model, interrupted=self.control.is_interrupted)
        if result is None:
            return None
        seconds = time.monotonic() - began
        self.logger.say(f"{self.step_of(state)} | {of} | {validation_line(result, seconds)}")
        return {"val_loss_average": result.val_loss}

    def is_over(self, state: TrainState, *, more: int = 0) -> bool:
        """Tell whether early stopping ends the run: a function of the state alone, so a resume decides alike."""
        patience = self.config.eval.early_stopping_patience
        return state.best_step is not None and 0 < patience <= state.worse + more

    def evaluate_hellaswag(self, state: TrainState) -> bool:
        """Measure HellaSwag accuracy with the current weights; tell whether it was completed."""
        assert self.hellaswag is not None
        began = time.monotonic()
        with self.weights(
            state, f"answering {fmt.number_of(self.hellaswag.num_items, 'item')} of HellaSwag"
        ) as model:
            results = self.hellaswag.measure(model, interrupted=self.control.is_interrupted)
        if results is None:
            return False
        summary = summarize(results)
        seconds = self.record("hellaswag", state, began, **summary)
        self.keep(results, state.step)
        scores = ", ".join(
            f"{name} {summary[name]:.4f} +- {fmt.number(summary[f'{name}_se'])}"
            for name in results.per_unit
        )
        took = fmt.duration(seconds)
        self.logger.say(
            f"{self.step_of(state)} | HellaSwag {scores} on {fmt.number_of(results.n, 'item')} | {took}"
        )
        return True

    def evaluate_core(self, state: TrainState) -> bool:
        """Score the current weights on the tasks of CORE; tell whether that was completed."""
        assert self.core is not None
        began, interrupted = time.monotonic(), self.control.is_interrupted
        with self.weights(state, "scoring CORE") as model:
            found = self.core.measure(
                model, self.strategy, step=state.step, interrupted=interrupted
            )
        if found is None:
            return False
        numbers, problem = found
        seconds = self.record("core", state, began, **numbers)
        if problem is not None:
            self.logger.warn(problem, state.step)
        cut = f", prompts of {numbers['cut']:,} cut" if numbers["cut"] else ""
        self.logger.say(
            f"{self.step_of(state)} | CORE {numbers['centered']:.4f} +- {fmt.number(numbers['centered_se'])} "
            f"on {numbers['n']:,} items of {numbers['tasks']} tasks{cut} | {fmt.duration(seconds)}"
        )
        return True

    def keep(self, results: Results, step: int) -> None:
        """Write an evaluation's results unit by unit, for `gpt2lab compare`."""
        if self.runtime.rank != 0:
            return
        path = file_of_step(self.run_dir, results.kind, step)
        try:
            write_results(path, dataclasses.replace(results, step=step))
        except OSError as error:
            self.logger.warn(f"{path}: not written ({error.strerror})", step)

    def sample(self, state: TrainState) -> bool:
        """Continue the run's prompt on rank 0 while the other ranks wait; tell whether that was completed."""
        tokenizer = self.tokenizer
        assert tokenizer is not None
        use = f"writing a sample of {self.config.eval.sample_tokens} tokens"
        with self.weights(state, use) as model:
            return self.runtime.on_rank_zero(lambda: self._sample_from(model, state, tokenizer))

    def _sample_from(self, model: GPT, state: TrainState, tokenizer: Tokenizer) -> bool:
        began, prompt = time.monotonic(), self.config.eval.sample_prompt
        try:
            with self.strategy.autocast():
                text = sample_text(
                    model,
                    self.prompt_ids(prompt, tokenizer)
                    if self.prompt_ids
                    else tokenizer.encode(prompt),
                    tokenizer,
                    max_new_tokens=self.config.eval.sample_tokens,
                    seed=rng.fold_seed(self.config.data.seed, state.step),
                    interrupted=lambda: self.control.signals.level > 0,
                )
        except DataError as error:  # training needs neither a vocabulary nor ids for the prompt
            self.logger.warn(f"no text sample: {error}", state.step)
            return True
        if text is None:
            return False
        if self.prompt_ids:
            text = text.removeprefix(tokenizer.end_token)  # the template begins with it
        self.record("sample", state, began, text=text)
        self.logger.say(f"{self.step_of(state)} | sample:\n{fmt.quoted(text)}")
        return True


def validation_line(result: ValidationLoss, seconds: float) -> str:
    """Format a validation loss as a console line."""
    error = "n/a" if result.val_loss_se is None else f"{result.val_loss_se:.4f}"
    bits = "" if result.bits_per_byte is None else f" ({result.bits_per_byte:.4f} bits/byte)"
    sources = "".join(f"{name} {of.val_loss:.4f} | " for name, of in result.by_source.items())
    return (
        f"val loss {result.val_loss:.4f} +- {error}{bits} "
        f"on {result.val_tokens:,} tokens ({result.val_effective_n:,.0f} effective {result.val_se_unit}s) | "
        f"{sources}{fmt.duration(seconds)}"
    )
