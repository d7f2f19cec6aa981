"""A checkpoint of ours as a model of EleutherAI's lm-evaluation-harness (lm-eval 0.4.9 and later).

    python -m gpt2lab.interop.lm_eval --model gpt2lab --model_args path=RUN --tasks hellaswag

is lm-eval's own command line, to which the model `gpt2lab` has been added: lm-eval has no way to find models of other
packages by itself. Encoding, truncation and stop texts are those of its model `hf`, so that both give the same answers.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string

from gpt2lab import paths
from gpt2lab.config.schema import Config, Dtype
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import ConfigError, DataError, GPT2LabError
from gpt2lab.evaluation.completion import SamplingParams
from gpt2lab.evaluation.generation import draw_each
from gpt2lab.evaluation.hellaswag import BATCH_TOKENS, cut_batches
from gpt2lab.evaluation.request import EvaluationRequest, Subject, load_subject
from gpt2lab.interop.scoring import Pair, score_continuations
from gpt2lab.model import rng
from gpt2lab.runs.console import counted
from gpt2lab.runs.target import find_target, was_tuned
from gpt2lab.tokenizers.chat_template import jinja

_MAX_NEW_TOKENS = 256  # lm-eval's default for tasks that do not say how many


@dataclass(frozen=True)
class Prompt:
    """One request for a text; `slot` says which."""

    ids: list[int]
    slot: int
    room: int  # for new tokens

    def __len__(self) -> int:
        """Count the positions that it will need."""
        return len(self.ids) + self.room


@register_model("gpt2lab")
class GPT2LabLM(TemplateLM):  # type: ignore[misc]  # untyped
    """Weights of ours that answer lm-eval's requests.

    Every rank gets all requests, computes some batches of them and gets all answers. So lm-eval sees one
    process, and the world size decides which rank computes a batch, never what a batch contains.
    """

    def __init__(self, subject: Subject) -> None:
        """Raise ConfigError if the weights' ids mean no text."""
        super().__init__()
        self._subject = subject
        self._tokenizer = subject.text_tokenizer("tasks cannot be measured")
        self._device = subject.runtime.device
        self._batch_tokens = BATCH_TOKENS[self._device.type]
        self.max_length = subject.model.config.context_length
        subject.model.eval()

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> GPT2LabLM:
        """Open the model that `--model_args path=RUN` names; also dtype=fp32|bf16|fp16, checkpoint_dir=DIR.

        Batches are cut by tokens, so --batch_size has no effect.

        Raises: CheckpointError, ConfigError, DataError.
        """
        given = dict(arg_dict)
        name = given.pop("path", None)
        dtype, folder = given.pop("dtype", "auto"), given.pop("checkpoint_dir", None)
        if name is None or given or dtype not in get_args(Dtype):
            wrong = ", ".join(f"{key}={value}" for key, value in arg_dict.items()) or "nothing"
            raise ConfigError(
                f"--model_args {wrong}: gpt2lab takes path=RUN[,dtype=fp32|bf16|fp16][,checkpoint_dir=DIR]"
            )
        # lm-eval's default is cuda:0, also without a GPU; torchrun's rank decides which GPU is used.
        device = str((additional_config or {}).get("device") or "auto").partition(":")[0]
        if device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"--device {device}: gpt2lab computes on cpu or cuda")
        request = EvaluationRequest(
            str(name), device="cpu" if device == "cpu" else "auto", dtype=dtype
        )
        runtime, runs = Runtime(), paths.runs_folder(Path(folder) if folder else None)
        target = runtime.on_rank_zero(lambda: find_target(str(name), runs))
        return cls(load_subject(request, target, Config(), runtime))

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> GPT2LabLM:
        """Do the same as `create_from_arg_obj`, from a text."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        """The id of the end of text, which also stands for an empty context."""
        return self._tokenizer.end_of_text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the ids of a text; the end of text in it is the control token, as for transformers."""
        first, *others = map(self._tokenizer.encode, string.split(self._tokenizer.end_token))
        return [*first, *(id for part in others for id in (self.eot_token_id, *part))]

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return (log-probability in nats, whether greedy decoding writes it) of each continuation of a context."""
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, in windows as long as the context, every token predicted once."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            own = [make_disjoint_window(window) for window in windows]
            pairs += own
            owners += [number] * len(own)
        nats = self._score(pairs)[0]
        sums = np.bincount(owners, weights=nats, minlength=len(requests)) if pairs else nats
        return [float(value) for value in sums]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-probability in nats, whether greedy decoding writes it) of each continuation."""
        for (_, text), _, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise DataError(
                    f"the continuation {text!r:.60} has {len(continuation)} tokens; the model scores 1 to "
                    f"{self.max_length}, its context length"
                )
        # A context of spaces alone belongs to the continuation.
        pairs = [(context or [self.eot_token_id], ids) for _, context, ids in requests]
        nats, is_greedy = self._score(pairs)
        return list(zip(nats.tolist(), (is_greedy > 0).tolist(), strict=True))

    def _score(self, pairs: Sequence[Pair]) -> np.ndarray:
        subject = self._subject
        found = score_continuations(
            pairs, subject.model, subject.strategy, longest=self.max_length + 1
        )
        assert found is not None  # nothing interrupts it
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a text for each request, up to the first of its stop texts."""
        groups: dict[tuple[tuple[str, ...], SamplingParams], list[Prompt]] = defaultdict(list)
        for number, request in enumerate(requests):
            context, settings = request.args
            stops, style = self._sampling(settings)
            room = style.max_new_tokens
            # Cut on the left, so that the new tokens fit.
            ids = self.tok_encode(context)[-(self.max_length - room) :]
            groups[stops, style].append(Prompt(ids or [self.eot_token_id], number, room))
        batches = [
            (how, batch)
            for how, prompts in groups.items()
            for batch in cut_batches(prompts, batch_tokens=self._batch_tokens)
        ]
        own: dict[int, str] = {}
        runtime = self._subject.runtime
        for how, batch in counted(batches[runtime.rank :: runtime.world_size], "batches"):
            texts = self._write(*how, batch)
            own |= {prompt.slot: text for prompt, text in zip(batch, texts, strict=True)}
        found = {slot: text for part in runtime.gather(own) for slot, text in part.items()}
        return [found[number] for number in range(len(requests))]

    def _sampling(self, settings: dict[str, Any]) -> tuple[tuple[str, ...], SamplingParams]:
        """Return where a text ends, and how it is sampled."""
        given: dict[str, Any] = dict(normalize_gen_kwargs(settings, _MAX_NEW_TOKENS))
        until = handle_stop_sequences(given.pop("until", None), eos=self._tokenizer.end_token)
        room, is_drawn = given.pop("max_gen_toks"), given.pop("do_sample")
        temperature = float(given.pop("temperature", 1.0 if is_drawn else 0.0))
        style = SamplingParams(
            max_new_tokens=room,
            temperature=temperature if is_drawn else 0.0,
            top_k=max(0, int(given.pop("top_k", 50))),
            top_p=float(given.pop("top_p", 1.0)),
        )
        if given:
            raise ConfigError(
                f"generation_kwargs {', '.join(given)}: gpt2lab supports until, max_gen_toks, do_sample, temperature, "
                f"top_k and top_p"
            )
        if not 0 < room < self.max_length:
            raise ConfigError(
                f"a task asks for texts of {room} tokens (max_gen_toks), the model's context holds {self.max_length}; "
                f"lower max_gen_toks in the task's generation_kwargs"
            )
        return tuple(stop for stop in until if stop), style

    def _write(
        self, stops: tuple[str, ...], style: SamplingParams, prompts: list[Prompt]
    ) -> list[str]:
        end = self.eot_token_id
        # A token has at least one byte, so this many hold every stop text that the newest one completes.
        tail = max(len(stop.encode()) for stop in stops) + 4
        written: list[list[int]] = [[] for _ in prompts]
        is_done = [False] * len(prompts)
        with self._subject.strategy.autocast():
            for drawn in draw_each(
                self._subject.model,
                [prompt.ids for prompt in prompts],
                max_new_tokens=style.max_new_tokens,
                generators=[
                    torch.Generator().manual_seed(rng.fold_seed(torch.initial_seed(), prompt.slot))
                    for prompt in prompts
                ],
                temperature=style.temperature,
                top_k=style.top_k,
                top_p=style.top_p,
            ):
                for number, id in enumerate(drawn):
                    if is_done[number]:
                        continue
                    if id != end:
                        written[number].append(id)
                    ending = self._tokenizer.decode(written[number][-tail:])
                    is_done[number] = id == end or any(stop in ending for stop in stops)
                if all(is_done):
                    break
        texts = map(self._tokenizer.decode, written)
        return [postprocess_generated_text(text, list(stops), None) for text in texts]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as the text that a fine-tuned model learned."""
        from jinja2 import Environment

        environment = Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers does
        template = environment.from_string(self.chat_template(True))
        text = template.render(messages=chat_history)
        # Without it, the model continues the last message, an answer.
        return text if add_generation_prompt else text.removesuffix(self._tokenizer.end_token)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the template as jinja.

        Raises: ConfigError if the model was not fine-tuned.
        """
        target = self._subject.target
        if not was_tuned(target):
            raise ConfigError(
                f"{target.name}: no chat template, because it was not fine-tuned; leave out --apply_chat_template"
            )
        return jinja(self._tokenizer.end_token)

    @property
    def tokenizer_name(self) -> str:
        """Name tokenizer and template, by which lm-eval keeps requests that it has built."""
        return f"gpt2lab-{self._tokenizer.hash[:12]}"


def main() -> int:
    """Hand over to lm-eval's own command line; return the exit code."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except GPT2LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
