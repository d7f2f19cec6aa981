"""The fine-tuning recipe: conversations in place of shards, answers as targets, all weights or LoRA adapters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gpt2lab.config.request import RunRequest
from gpt2lab.config.schema import LENGTHS, Config
from gpt2lab.config.settings import override
from gpt2lab.data.shards import TokenData
from gpt2lab.errors import ConfigError
from gpt2lab.finetuning.rows import InstructionData, open_instructions
from gpt2lab.model.counts import check_lora_targets
from gpt2lab.tokenizers.chat_template import as_prompt, prompt_ids
from gpt2lab.tokenizers.interface import Tokenizer
from gpt2lab.training.recipe import Batches, Recipe

if TYPE_CHECKING:
    from torch import nn

    from gpt2lab.distributed.runtime import Runtime
    from gpt2lab.model.gpt import GPT
    from gpt2lab.training.start import Start

_ROWS, _ROWS_OF_SMALL = 16, 4  # a step; the small presets are for the CPU, and for little data
_SMALL = 20_000  # tokens a step of pretraining


class FineTuning(Recipe):
    """Next-token prediction on the answers of conversations."""

    def defaults(self, request: RunRequest, config: Config) -> Config:
        """Return the settings with fine-tuning's own defaults for what the user did not choose.

        The rate is a tenth of the pretraining preset's. Adapters begin at zero and get half of the rate of the matrices
        beside them, which is `muon_lr` where the preset has one.

        Raises: ConfigError if the model to tune or the conversations are missing.
        """
        tuning, T = config.tuning, config.model.context_length
        if config.init.init_from is None:
            raise ConfigError(
                "--init_from is missing: the model to fine-tune, a run, a checkpoint, a Hugging Face folder or hf:NAME"
            )
        if tuning.instructions is None:
            raise ConfigError(
                "--instructions is missing: the conversations to train on, a .jsonl file, hf:NAME or demo"
            )
        optim, chosen = config.optim, request.chosen
        if tuning.lora_r:
            check_lora_targets(config.model, tuning)
            if optim.has_muon and "optimizer" in chosen:
                raise ConfigError(
                    f"--optimizer {optim.optimizer}: is for the matrices of the blocks, which adapters leave frozen; "
                    "leave it out"
                )
        elif idle := sorted({"lora_alpha", "lora_targets"} & request.typed):
            raise ConfigError(f"--{idle[0]} needs --lora_r N: without it all weights are trained")
        matrices = optim.max_lr if optim.muon_lr is None else optim.muon_lr
        # To AdamW's scale, as Muon's own default.
        if optim.has_muon and optim.muon_adjust_lr == "original":
            matrices /= 0.2 * math.sqrt(config.model.n_embd)
        own = ("muon_lr", "embedding_lr", "head_lr", "vector_lr")
        rates = {name: rate for name in own if (rate := getattr(optim, name)) is not None}
        rows = _ROWS_OF_SMALL if config.batch.total_batch_size < _SMALL else _ROWS
        values: dict[str, Any] = {
            "shuffle": "windows",
            "max_lr": _part(matrices, 0.5) if tuning.lora_r else _part(optim.max_lr, 0.1),
            **{name: _part(rate, 0.1) for name, rate in rates.items()},
            "optimizer": "adamw" if tuning.lora_r else optim.optimizer,
            "total_batch_size": rows * T,
            "mini_batch_size": min(rows, config.batch.mini_batch_size),
            "weight_decay": 0.0,
            "adamw_decay": None,
            "eval_freq": 50,
            "sample_freq": 50,
            "checkpoint_freq": 50,
            "keep_checkpoints": 3,
            "epoch_checkpoints": "off",
            "sample_prompt": as_prompt("Who are you?"),
        }
        if not chosen & set(LENGTHS):
            values["num_epochs"] = 3.0
        return override(config, {name: v for name, v in values.items() if name not in chosen})

    def open_data(self, config: Config, tokenizer: Tokenizer | None) -> TokenData:
        """Read, encode and split the conversations of --instructions.

        Raises: DataError; ConfigError where losses of single tokens are to be kept.
        """
        if config.eval.keep_token_losses:
            raise ConfigError(
                "--keep_token_losses is for windows of token shards, and fine-tuning measures answers; leave it out"
            )
        return open_instructions(config, tokenizer)

    def build_model(self, start: Start, runtime: Runtime) -> GPT:
        """Build the model with the weights to tune, and with adapters if they are wanted."""
        from gpt2lab.model.lora import add_lora, init_adapters

        config = start.config
        model = super().build_model(start, runtime)
        if config.tuning.lora_r:
            add_lora(model, config.tuning)
            init_adapters(model, seed=config.data.seed)
        return model

    def open_batches(self, start: Start, runtime: Runtime) -> Batches:
        """Return the rows to train on, and those held out."""
        from gpt2lab.finetuning.evaluation import AnswerLoss
        from gpt2lab.finetuning.packed import RowLoader

        data, rank, device = start.data, runtime.rank, runtime.device
        assert isinstance(data, InstructionData)
        return Batches(
            RowLoader(start.order, data.rows["train"], start.plan.batch, rank=rank, device=device),
            validation=lambda strategy: AnswerLoss(
                data.rows["val"],
                val_tokens=start.config.eval.val_tokens,
                batch_size=start.plan.batch.micro_batch,
                strategy=strategy,
            ),
            prompt_ids=prompt_ids,
        )

    def to_train(self, model: GPT, data: TokenData) -> nn.Module:
        """Return the model in a module that keeps packed conversations apart."""
        from gpt2lab.finetuning.packed import PackedGPT

        assert data.tokenizer is not None  # open_instructions needs one
        return PackedGPT(model, data.tokenizer.end_of_text)


def _part(rate: float, factor: float) -> float:
    return float(f"{rate * factor:.12g}")  # without rounding errors of the product


FINETUNING = FineTuning()
