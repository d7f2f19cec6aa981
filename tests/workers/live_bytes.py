"""On each of two processes: the peak of a real step's tensor bytes in every mode, or in the cases that argv has."""

import dataclasses
import json
import sys
from typing import get_args

import torch

from benchmarks.live_bytes import peak_of_step
from gpt2lab.config import schema
from gpt2lab.config.schema import ModelConfig, OptimConfig, Parallel, SystemConfig
from gpt2lab.data.loader import GlobalBatch, MicroBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.model.gpt import build_model
from gpt2lab.optim.optimizers import build_optimizers
from one_process import shape
from tiny import MODERN


def modern(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, **MODERN)


CASES = [
    (shape(4, 128, 4, 128, 512), 8, 1, "fp32", "adamw"),
    (shape(4, 128, 4, 128, 512), 4, 2, "bf16", "adamw"),
    (shape(2, 128, 4, 128, 4096), 6, 2, "fp32", "adamw"),
    (modern(shape(4, 128, 4, 128, 512)), 6, 2, "bf16", "adamw"),
    (modern(shape(4, 256, 4, 32, 512)), 2, 1, "fp32", "normuon"),
]
MODES = [(parallel, "fp32") for parallel in get_args(Parallel)] + [("fsdp", "bf16")]
runtime = Runtime()
runtime.use(SystemConfig(device="cpu"))
for config, B, A, dtype, optimizer in CASES:
    for parallel, param_dtype in MODES:
        if param_dtype == "bf16" and dtype != "bf16":
            continue
        for recompute in get_args(schema.ActivationCheckpointing):
            if recompute != "none" and (config, A) != (CASES[0][0], 1):
                continue
            system = SystemConfig(dtype=dtype, parallel=parallel, fsdp_param_dtype=param_dtype)
            system = dataclasses.replace(system, activation_checkpointing=recompute)
            case = {"model": dataclasses.asdict(config), "B": B, "A": A, "dtype": dtype}
            case |= {"parallel": parallel, "recompute": recompute}
            case |= {"optimizer": optimizer, "param_dtype": param_dtype}
            if len(sys.argv) > 1 and json.dumps(case) not in sys.argv:
                continue
            strategy = Strategy(runtime, system)
            model = build_model(config, seed=0, device=runtime.device)
            wrapped = strategy.prepare(model)
            how = OptimConfig(optimizer=optimizer)
            optimizers = build_optimizers(model, how)
            optimizers = strategy.shard_optimizer_state(model, optimizers)
            ids = torch.zeros(A, B, config.context_length, dtype=torch.int64)
            micro = [MicroBatch(ids[i].clone(), ids[i], i, i == A - 1) for i in range(A)]
            batch = GlobalBatch(tuple(micro), 2 * ids.numel(), 0, 0, 2 * A * B, None, 0.0)
            case["peak"] = peak_of_step(wrapped, optimizers, batch, strategy)
            if runtime.rank == 0:
                print("peak " + json.dumps(case), flush=True)
runtime.close()
