"""What one kind of training decides itself; everything else of a run is the same for every kind.

To add a recipe, override what differs of these five methods and hand an instance to `pretrain`. Whatever builds tensors
imports torch inside the method, so that `--dry_run` and a rejected command line do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2lab.config.derived import fit_vocabulary
from gpt2lab.config.mixture import read_sources
from gpt2lab.config.request import RunRequest
from gpt2lab.config.schema import Config
from gpt2lab.data.manifest import tokenizer_of
from gpt2lab.data.mixture import open_sources
from gpt2lab.data.shards import TokenData
from gpt2lab.tokenizers.interface import Tokenizer

if TYPE_CHECKING:
    from torch import nn

    from gpt2lab.data.loader import Loader
    from gpt2lab.distributed.runtime import Runtime
    from gpt2lab.distributed.strategy import Strategy
    from gpt2lab.evaluation.validation import MeasuresLoss
    from gpt2lab.model.gpt import GPT
    from gpt2lab.training.start import Start


@dataclass(frozen=True)
class Batches:
    """Where a run's batches come from, what its validation loss is measured on, and how its text samples begin."""

    loader: Loader
    validation: Callable[[Strategy], MeasuresLoss]
    prompt_ids: Callable[[str, Tokenizer], list[int]] | None = None  # default the text's own


class Recipe:
    """Next-token prediction on windows of token shards; another kind of training overrides what differs."""

    def defaults(self, request: RunRequest, config: Config) -> Config:
        """Return the settings of a fresh start where nothing was chosen: a vocabulary that suits the data's tokenizer.

        Raises: ConfigError if something that this recipe needs is missing.
        """
        if config.init.init_from is not None or "num_tokens" in request.chosen:
            return config
        tokenizer = tokenizer_of(read_sources(config.data).folders[0])
        num_tokens = None if tokenizer is None else tokenizer.size
        return fit_vocabulary(config, num_tokens, is_typed="vocab_size" in request.chosen)

    def open_data(self, config: Config, tokenizer: Tokenizer | None) -> TokenData:
        """Open what the run trains on, here the folders of token shards.

        `tokenizer`: of the weights it begins with, None for random or unknown ones.

        Raises: DataError, ConfigError.
        """
        return open_sources(read_sources(config.data), vocab_size=config.model.vocab_size)

    def build_model(self, start: Start, runtime: Runtime) -> GPT:
        """Build the model with random weights, or with those of --init_from, whose source may be damaged.

        The run has no folder yet.

        Raises: CheckpointError, ConfigError on all ranks.
        """
        from gpt2lab.model.gpt import build_model
        from gpt2lab.runs.weights import load_initial

        config = start.config
        init, seed = config.init.weight_init, config.data.seed
        model = build_model(config.model, seed=seed, device=runtime.device, weight_init=init)
        if start.initial is not None:
            load_initial(start.initial.target, model, runtime)
        return model

    def open_batches(self, start: Start, runtime: Runtime) -> Batches:
        """Return the batches to train on, here windows of the run's shards, and the loss to validate with.

        Raises: DataError.
        """
        from gpt2lab.data.loader import Loader
        from gpt2lab.data.windows import WindowReader
        from gpt2lab.evaluation.validation import open_validation

        config, rank, device = start.config, runtime.rank, runtime.device
        train = WindowReader(
            start.data.splits["train"],
            context_length=config.model.context_length,
            id_limit=config.model.id_limit,
            verify=runtime.local_rank == 0,  # once on each machine, which may have own files
        )
        return Batches(
            Loader(start.order, train, start.plan.batch, rank=rank, device=device),
            validation=lambda strategy: open_validation(
                start.data,
                config.model,
                val_tokens=config.eval.val_tokens,
                batch_size=start.plan.batch.micro_batch,
                strategy=strategy,
            ),
        )

    def to_train(self, model: GPT, data: TokenData) -> nn.Module:
        """Return the module, here the model, that maps token ids and targets, both (B, T), to the summed loss, ()."""
        return model


PRETRAINING = Recipe()
