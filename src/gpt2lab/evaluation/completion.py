"""Complete prompts with a model, as `gpt2lab sample` does. Imports torch only to compute."""

import itertools
import json
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpt2lab import fmt
from gpt2lab.config.flags import check_least, option
from gpt2lab.config.schema import Dtype, SystemConfig
from gpt2lab.errors import ConfigError, DataError, SaveError, system_errors_as
from gpt2lab.evaluation.request import require_gpu
from gpt2lab.files import staged_new_file
from gpt2lab.runs.console import counted, doing
from gpt2lab.runs.target import find_target, was_tuned
from gpt2lab.tokenizers.chat_template import begins_answer, encode_typed
from gpt2lab.tokenizers.opening import why_no_text

_SIDE_BY_SIDE = 16  # texts drawn at a time: their number decides the memory


@dataclass(frozen=True)
class SamplingParams:
    """How a text is drawn; flags of `gpt2lab sample` and `gpt2lab chat`."""

    max_new_tokens: int = option(100, "most tokens of a text, not counting its prompt", least=1)
    temperature: float = option(1.0, "0 = always the likeliest token")
    top_k: int = option(50, "draw from the K likeliest tokens; 0 = from all", least=0)
    top_p: float = option(1.0, "of these, from the fewest whose probabilities sum to this")
    seed: int = option(1337, "same seed and same prompt, same text", least=0)


def check_sampling(style: SamplingParams) -> None:
    """Reject settings that cannot draw a token.

    Raises: ConfigError.
    """
    check_least(style)
    if not (style.temperature == 0 or 1e-5 <= style.temperature < float("inf")):
        raise ConfigError(f"temperature {style.temperature} must be 0, or at least 1e-5")
    if not 0 < style.top_p <= 1:
        raise ConfigError(f"top_p {style.top_p} must be above 0 and at most 1")


@dataclass(frozen=True)
class Completion:
    """One text, without its prompt."""

    text: str
    tokens: int
    ended: bool  # by the model itself, with end-of-text


class Completer:
    """A model that continues prompts, with a count of tokens and seconds."""

    def __init__(
        self,
        name: str,
        *,
        checkpoint_dir: Path,
        device: Literal["auto", "cpu", "cuda"],
        dtype: Dtype,
        style: SamplingParams,
    ) -> None:
        """Load the model that `name` means.

        Raises: CheckpointError, ConfigError, DataError.
        """
        target = find_target(name, checkpoint_dir)
        tokenizer = target.tokenizer()
        problem = why_no_text(tokenizer, target.model_config().vocab_size)
        if tokenizer is None or problem is not None:
            raise ConfigError(f"{name}: {problem}: it cannot read or write text")
        require_gpu(device)
        from gpt2lab.distributed.runtime import Runtime, resolve_dtype
        from gpt2lab.distributed.strategy import Strategy
        from gpt2lab.runs.weights import load_weights

        runtime = Runtime()
        runtime.use(SystemConfig(device=device))
        self.strategy = Strategy(runtime, SystemConfig(dtype=resolve_dtype(dtype, runtime.device)))
        self.tokenizer = tokenizer
        self.model = load_weights(target).eval().to(runtime.device)
        self.target, self.style, self.warnings = target, style, target.warnings
        self.context_length = self.model.config.context_length
        self.tokens, self.seconds = 0, 0.0
        self.outgrew = False  # True if some text was longer than the context

    def ids_of(self, text: str) -> list[int]:
        """Return the ids of a text; a tuned model's may hold the end of text of the chat template, typed out."""
        tokenizer, is_tuned = self.tokenizer, was_tuned(self.target)
        return encode_typed(text, tokenizer) if is_tuned else tokenizer.encode(text)

    def encode(self, prompt: str, where: str = "the prompt") -> list[int]:
        """Return the ids of a prompt.

        Raises: ConfigError if they do not fit into the context.
        """
        ids, limit = self.ids_of(prompt), self.context_length
        if len(ids) > limit:
            raise ConfigError(
                f"{where} has {len(ids)} tokens, the model's context holds {limit}; shorten it"
            )
        return ids

    def complete(
        self, ids: list[int], *, number: int = 0, num_samples: int = 1
    ) -> Iterator[Completion]:
        """Yield continuations of prompt `number`, drawn 16 at a time; each depends on seed, prompt and its place."""
        end, most = self.tokenizer.end_of_text, self.style.max_new_tokens
        for first in range(0, num_samples, _SIDE_BY_SIDE):
            places = list(range(first, min(first + _SIDE_BY_SIDE, num_samples)))
            with doing(f"drawing {fmt.number_of(len(places), 'text')}"):
                rows = list(counted(self.draw(ids, number, places, self.style), "tokens", most))
            for drawn in map(list, zip(*rows, strict=True)):
                text = drawn[: drawn.index(end)] if (ended := end in drawn) else drawn
                shown = self.tokenizer.decode_after(self.before(ids), text)
                yield Completion(shown, len(text), ended)

    def stream(
        self, ids: list[int], *, number: int, place: int, at_most: int | None = None
    ) -> Iterator[str]:
        """Yield the text of `complete` at `place` token by token, up to `at_most` tokens."""
        drawn = itertools.islice(self.draw(ids, number, [place], self.style), at_most)
        end = self.tokenizer.end_of_text
        yield from self.tokenizer.stream((id for (id,) in drawn if id != end), self.before(ids))

    def before(self, ids: list[int]) -> list[int]:
        """Return the ids that a continuation is decoded after: the prompt's, but an answer is a text of its own."""
        is_answer = was_tuned(self.target) and begins_answer(ids, self.tokenizer)
        return [] if is_answer else ids

    def draw(
        self, ids: list[int], number: int, places: list[int], style: SamplingParams
    ) -> Generator[list[int], None, None]:
        """Yield the next id of the text at each place; `end_of_text` for one that has ended."""
        import torch

        from gpt2lab.evaluation.generation import draw
        from gpt2lab.model import rng

        began = time.monotonic()
        generators = [
            torch.Generator().manual_seed(rng.fold_seed(style.seed, number, place))
            for place in places
        ]
        length, ended = max(1, len(ids)), [False] * len(places)
        with self.strategy.autocast():
            for drawn in draw(
                self.model,
                ids,
                max_new_tokens=style.max_new_tokens,
                generators=generators,
                temperature=style.temperature,
                top_k=style.top_k,
                top_p=style.top_p,
                end_of_text=self.tokenizer.end_of_text,
            ):
                length += 1
                self.tokens += ended.count(False)
                ended = [
                    over or id == self.tokenizer.end_of_text
                    for over, id in zip(ended, drawn, strict=True)
                ]
                yield drawn
        self.outgrew |= length - 1 > self.context_length
        self.seconds += time.monotonic() - began

    def describe_speed(self) -> str:
        """Return how many tokens were drawn and how fast, prompts included."""
        rate = self.tokens / max(self.seconds, 1e-9)
        text = f"{self.tokens:,} tokens in {self.seconds:.1f} s, {rate:,.1f} tokens/s"
        if self.outgrew:
            text += f"; texts beyond {self.context_length} tokens dropped their oldest half"
        return text


def complete_file(completer: Completer, source: Path, out: Path, *, num_samples: int) -> None:
    """Continue every line of `source` `num_samples` times; write one JSON object a text to `out`, which appears last.

    Keys: prompt, text (without the prompt), line (from 1), sample (from 0), tokens, ended.

    Raises: ConfigError before anything is computed; SaveError.
    """
    if out.exists():
        raise ConfigError(f"{out}: exists already; choose another --out")
    try:
        told = system_errors_as(DataError, source, fix="--batch takes a text file")
        with told, open(source, encoding="utf-8-sig") as lines:
            prompts = [line.removesuffix("\n") for line in lines]
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 text ({error})") from error
    if not prompts:
        raise DataError(f"{source}: empty; one prompt a line is read")
    encoded = [
        completer.encode(prompt, f"{source} line {number}")
        for number, prompt in enumerate(prompts, start=1)
    ]
    with (
        system_errors_as(SaveError, out, fix="choose another --out"),
        staged_new_file(out) as temporary,
        open(temporary, "w", encoding="utf-8") as file,
    ):
        for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
            texts = completer.complete(ids, number=number, num_samples=num_samples)
            for sample, found in enumerate(texts):
                place = {"line": number + 1, "sample": sample}
                line = {"prompt": prompt, "text": found.text, **place}
                line |= {"tokens": found.tokens, "ended": found.ended}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
