"""The fine-tuning recipe: what it makes itself; the engine is pretraining's."""

from __future__ import annotations

from gpt2lab.distributed.runtime import Runtime
from gpt2lab.finetuning.answer_loss import AnswerLoss
from gpt2lab.finetuning.loader import RowLoader, order_of
from gpt2lab.finetuning.packed import PackedGPT
from gpt2lab.finetuning.rows import InstructionData
from gpt2lab.model.gpt import GPT
from gpt2lab.model.lora import add_lora, init_adapters
from gpt2lab.training.parts import Recipe, Sources, build_first
from gpt2lab.training.start import Start


def build_model(start: Start, runtime: Runtime) -> GPT:
    """Build the model with the weights that are to be tuned, and with adapters if they are wanted.

    Raises: CheckpointError, ConfigError on all processes.
    """
    config = start.config
    model = build_first(start, runtime)
    if config.tuning.lora_r:
        add_lora(model, config.tuning)
        init_adapters(model, seed=config.data.seed)
    return model


def open_rows(start: Start, runtime: Runtime) -> Sources:
    """Return the rows to train on, and those held out."""
    config, data = start.config, start.data
    assert isinstance(data, InstructionData)
    order = order_of(data.rows["train"], shuffle=config.data.shuffle, seed=config.data.seed)
    return Sources(
        loader=RowLoader(
            order, data.rows["train"], start.plan.batch, rank=runtime.rank, device=runtime.device
        ),
        validation=lambda strategy: AnswerLoss(
            data.rows["val"],
            val_tokens=config.eval.val_tokens,
            batch_size=config.batch.mini_batch_size,
            strategy=strategy,
            runtime=runtime,
        ),
    )


FINETUNING = Recipe(build_model, open_rows, to_train=PackedGPT)
