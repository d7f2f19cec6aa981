"""litgpt's own `setup`, as `litgpt pretrain` calls it, on a GPT-2-sized model; run as a program of its own.

litgpt_setup.py TOKENS.bin N_LAYER N_HEAD N_EMBD VOCAB_SIZE CONTEXT_LENGTH MINI_BATCH_SIZE ACCUMULATION

LayerNorm, GELU MLP, biases and tied embeddings; rotary positions, because litgpt has no learned ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.pretrain import setup
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset[torch.Tensor]):
    """Windows of T + 1 ids, one after the other."""

    def __init__(self, path: str, T: int) -> None:
        self.tokens = torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int64))
        self.T = T

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.T

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index * self.T : index * self.T + self.T + 1]


class Tokens(DataModule):  # type: ignore[misc]
    """The benchmark's tokens, for litgpt."""

    def __init__(self, windows: Windows) -> None:
        self.windows, self.batch_size = windows, 1

    def connect(
        self, tokenizer: object = None, batch_size: int = 1, max_seq_length: int | None = None
    ) -> None:
        """Be told the batch size."""
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return the batches."""
        return DataLoader(self.windows, batch_size=self.batch_size, drop_last=True)

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        """Return the same."""
        return self.train_dataloader()


def main(tokens_path: str, *shape: str) -> None:
    """Train until killed."""
    L, H, C, V, T, B, accumulation = map(int, shape)
    config = Config(
        **{"name": "gpt2like", "block_size": T, "vocab_size": V, "padded_vocab_size": V},
        **{"n_layer": L, "n_head": H, "n_embd": C, "intermediate_size": 4 * C},
        **{"bias": True, "attn_bias": True, "parallel_residual": False, "rotary_percentage": 1.0},
        gelu_approximate="tanh",
    )
    setup(
        "gpt2like",
        model_config=config,
        out_dir=Path("out"),
        data=Tokens(Windows(tokens_path, T)),
        devices=1,
        logger_name="csv",
        train=TrainArgs(
            save_interval=None,
            log_interval=1,
            global_batch_size=B * accumulation,
            micro_batch_size=B,
            max_tokens=10**9,
            max_norm=1.0,
            min_lr=6e-5,
            lr_warmup_steps=10,
            tie_embeddings=True,
            max_seq_length=T,
        ),
        eval=EvalArgs(interval=10**9, max_iters=1, final_validation=False),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
