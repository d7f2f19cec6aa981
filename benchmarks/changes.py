"""What one change of the blocks, of the head or of training would bring: the trainer's own steps with it, by seed.

PYTHONPATH=src python -m benchmarks.changes OUT.jsonl --changes untied_head --model modern-micro --optimizer muon

All but SETTINGS are not in the program; docs/log/2026.md has what they brought. Flags that are not of this program
go to every run, as in `ablate`. Each run adds a line to OUT.jsonl as it ends; runs that are in it are not repeated. At
the end all are compared with `none`, seed by seed. All is done in one process, so that what is compiled serves all
seeds; nothing is saved but the losses.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpt2lab import files, fmt
from gpt2lab.commands import entry
from gpt2lab.commands.command_line import parse
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import argument, option
from gpt2lab.data.loader import GlobalBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import CheckError, ConfigError
from gpt2lab.lab import over_seeds
from gpt2lab.model import rng
from gpt2lab.model.gpt import GPT, RotaryAngles, apply_rotary, attend, embedding
from gpt2lab.optim.muon import Muon
from gpt2lab.optim.schedule import lr_at
from gpt2lab.training import device, pretrain
from gpt2lab.training.recipe import PRETRAINING
from gpt2lab.training.resolve import resolve_to_train
from gpt2lab.training.train_step import is_finite, train_step

ChangeName = Literal[
    "none",
    "untied_head",
    "zero_projections",
    "soft_cap",
    "no_biases_no_gains",
    "value_embeddings",
    "cautious_decay",
    "normuon",
    "joined_qkv",
    "growing_batch",
    "tail_average",
]
# What the program has too, as settings; the head of the log's runs began at zero, its cap was Gemma's.
SETTINGS: dict[ChangeName, dict[str, Any]] = {
    "untied_head": {"head": "untied"},
    "soft_cap": {"logit_cap": 15.0},
    "normuon": {"optimizer": "normuon"},
}
TAIL = 0.01  # of the run's steps: what the average of the weights spans
# From these parts of the tokens on, so many half batches a step; the rate follows the root of the batch.
GROWTH = ((0.0, 1), (1 / 3, 2), (2 / 3, 4))


@dataclass(frozen=True)
class Flags:
    """Changes, one at a time."""

    out: Path = argument("file of the runs, a line of JSON each")
    changes: tuple[ChangeName, ...] = option(get_args(ChangeName), "changes beside `none`")
    seeds: tuple[int, ...] = option((1, 2, 3), "seeds of every change")


def blocks_of(model: GPT) -> list[Any]:
    """Return the blocks; Any, because their parts are replaced."""
    return list(model.blocks)


class GainlessNorm(nn.Module):
    """RMSNorm without gains."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of (..., C)."""
        return F.rms_norm(x, (x.size(-1),), eps=1e-5)


def zero_projections(model: GPT) -> None:
    """Begin the projections into the residual stream at zero."""
    with torch.no_grad():
        for block in blocks_of(model):
            block.attn.c_proj.weight.zero_()
            block.mlp.c_proj.weight.zero_()


def remove_biases_and_gains(model: GPT) -> None:
    """Leave matrices and embeddings only."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_parameter("bias", None)
    for block in blocks_of(model):
        block.ln_1, block.ln_2 = GainlessNorm(), GainlessNorm()
        block.attn.q_norm, block.attn.k_norm = GainlessNorm(), GainlessNorm()
    model.ln_f = GainlessNorm()


def add_value_embeddings(model: GPT) -> None:
    """Add an embedding of the token to the values of every second block, the last included.

    Source: Zhou et al. 2024 (arXiv:2410.17897), as modded-nanogpt has it: a table of its own for each block.
    """
    if (model.config.positions, model.config.qk_norm) != ("rotary", "rmsnorm"):
        raise ConfigError("--changes value_embeddings needs a --model modern-...")
    generator = torch.Generator().manual_seed(1)
    seen: list[Tensor] = []
    embed = model.embed

    def embed_and_keep(tokens: Tensor, positions: Tensor | None) -> Any:
        seen[:] = [tokens]
        return embed(tokens, positions)

    def attend_with(attention: Any, table: nn.Embedding) -> Callable[..., Tensor]:
        def forward(
            x: Tensor, mask: None = None, cache: None = None, rotation: RotaryAngles | None = None
        ) -> Tensor:
            B, T, C = x.shape
            q, k, v = attention.c_attn(x).split(C, dim=2)
            v = v + table(seen[0]).type_as(v)
            q, k, v = (y.view(B, T, attention.n_head, -1).transpose(1, 2) for y in (q, k, v))
            q, k = attention.q_norm(q.float()).type_as(v), attention.k_norm(k.float()).type_as(v)
            assert rotation is not None
            q, k = apply_rotary(q, rotation), apply_rotary(k, rotation)
            y = attend(q, k, v, None, 0.0).transpose(1, 2).reshape(B, T, C)
            projected: Tensor = attention.c_proj(y)
            return projected

        return forward

    model.embed = embed_and_keep  # type: ignore[method-assign]
    model.value_embeddings = nn.ModuleList()
    for block in blocks_of(model)[1::2]:
        table = embedding(model.config.vocab_size, model.config.n_embd)
        with torch.no_grad():
            table.weight.normal_(0.0, 0.02, generator=generator)
        model.value_embeddings.append(table)
        block.attn.forward = attend_with(block.attn, table)


OF_THE_MODEL: dict[ChangeName, Callable[[GPT], None]] = {
    "zero_projections": zero_projections,
    "no_biases_no_gains": remove_biases_and_gains,
    "value_embeddings": add_value_embeddings,
}


class CautiousMuon(Muon):
    """Muon that decays a weight only where the update shrinks it too (arXiv:2510.12402)."""

    def _update(self, rows: int, columns: int, entries: Any) -> None:
        updates = self._orthogonal([parameter for parameter, _ in entries], rows, columns)
        scale = 0.2 * math.sqrt(max(rows, columns))
        for (parameter, group), update in zip(entries, updates, strict=True):
            lr, decay = group["lr"], group["weight_decay"]
            shrinks = (update * parameter > 0).float()
            parameter.mul_(1 - lr * decay * shrinks).add_(update, alpha=-lr * scale)


def change_muon(change: ChangeName, muon: torch.optim.Optimizer) -> None:
    """Change how the matrices of the blocks are updated."""
    if change == "cautious_decay":
        muon.__class__ = CautiousMuon
    else:  # joined_qkv: one matrix instead of three
        for group in muon.param_groups:
            group["parts"] = 1


def grow(batches: Iterator[GlobalBatch], steps: int) -> Iterator[tuple[int, float, GlobalBatch]]:
    """Yield the half batches of a step, the factor of its rate, and their join."""
    done = 0
    while done < steps:
        wanted = [halves for begin, halves in GROWTH if done / steps >= begin][-1]
        parts = [next(batches) for _ in range(min(wanted, steps - done))]
        micro = [one for part in parts for one in part.micro_batches]
        last = len(micro) - 1
        joined = replace(
            parts[0],
            micro_batches=tuple(
                replace(one, index=index, is_last=index == last) for index, one in enumerate(micro)
            ),
            num_targets=sum(part.num_targets for part in parts),
            samples=sum(part.samples for part in parts),
        )
        done += len(parts)
        yield len(parts), math.sqrt(wanted / 2), joined


class TailAverage:
    """The exponential average of all weights over the last part of a run."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        self._weights = [parameter.detach() for parameter in model.parameters()]
        self._mean: list[Tensor] = []
        self._keeps, self._seen = 1 - 1 / max(1.0, TAIL * steps), 0

    def update(self) -> None:
        """Take in the weights after a step."""
        self._seen += 1
        if self._seen == 1:
            self._mean = [weight.clone() for weight in self._weights]
        keeps = min(self._keeps, 1 - 1 / self._seen)
        torch._foreach_lerp_(self._mean, self._weights, 1 - keeps)

    def put(self) -> None:
        """Let the model have it."""
        torch._foreach_copy_(self._weights, self._mean)


def train(change: ChangeName, seed: int, flags: list[str], runtime: Runtime) -> dict[str, Any]:
    """Train to the end and return what OUT.jsonl keeps."""
    request = parse(flags).request
    values: dict[str, Any] = {"seed": seed, "run_name": None}  # a new one: no folder is made
    values |= SETTINGS.get(change, {})
    if change == "growing_batch":
        if request.config.length.max_tokens is None:
            raise ConfigError("--changes growing_batch needs the run's length as --max_tokens")
        batch = request.config.batch
        values["total_batch_size"] = batch.total_batch_size // 2
        values["mini_batch_size"] = max(1, batch.mini_batch_size // 2)
    start = resolve_to_train(request.with_settings(**values), PRETRAINING, world_size=1)
    start = device.choose_hardware(start, runtime)
    config, steps = start.config, start.plan.max_steps
    model = PRETRAINING.build_model(start, runtime)
    if change in OF_THE_MODEL:
        OF_THE_MODEL[change](model)
    parts = pretrain.build(start, runtime, model, PRETRAINING)
    if change in ("cautious_decay", "joined_qkv"):
        change_muon(change, parts.optimizers[-1])
    average = TailAverage(model, steps) if change == "tail_average" else None
    batches = parts.batches.loader.batches(0)
    grown = grow(batches, steps) if change == "growing_batch" else ((1, 1.0, b) for b in batches)
    done, began = 0, time.process_time()
    for width, factor, batch_of_step in grown:
        done += width
        lr = lr_at(done, config.optim, max_steps=steps) * factor
        stats = train_step(
            parts.trained,
            parts.optimizers,
            batch_of_step,
            lr,
            strategy=parts.strategy,
            grad_clip=config.optim.grad_clip,
            seed=rng.fold_seed(config.data.seed, done),
            accept=is_finite,
        )
        if not stats.updated:
            raise CheckError(f"{change}, seed {seed}: diverged at step {done}")
        if average:
            average.update()
        if done == steps:
            break
    batches.close()
    seconds = time.process_time() - began
    if average:
        average.put()
    measured = parts.batches.validation(parts.strategy).measure(model)
    assert measured is not None  # no signal handler is there to interrupt it
    tokens = steps * config.batch.total_batch_size
    return {"tokens": tokens, "processor_seconds": round(seconds, 1), "val_loss": measured.val_loss}


def read_runs(path: Path, flags: list[str]) -> dict[tuple[str, int], dict[str, Any]]:
    """Read the runs that OUT.jsonl has, by change and seed.

    Raises: CheckError if it is another file, or of other flags.
    """
    try:
        runs = [files.parse_json(line) for line in path.read_text().splitlines()]
        found = {(run["change"], run["seed"]): run for run in runs}
        is_same = all(run["flags"] == flags for run in runs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckError(f"{path}: no file of runs that this program wrote") from error
    if not is_same:
        raise CheckError(f"{path} holds runs of other flags; name another file")
    return found


def main(argv: list[str]) -> int:
    """Train what is missing, then compare."""
    flags_of_runs: list[str] = []
    flags = parse_flags(Flags, argv, passed_on=flags_of_runs)
    changes: list[ChangeName] = list(dict.fromkeys(("none", *flags.changes)))
    if not flags.out.parent.is_dir():
        raise CheckError(f"{flags.out.parent}: no such folder")
    of_muon = [c for c in changes if c in ("cautious_decay", "joined_qkv", "normuon")]
    if of_muon and parse(flags_of_runs).request.config.optim.optimizer != "muon":
        raise ConfigError(f"--changes {' '.join(of_muon)}: needs --optimizer muon")
    runs = read_runs(flags.out, flags_of_runs) if flags.out.exists() else {}
    runtime = Runtime()
    for change in changes:
        torch._dynamo.reset()  # one change's code does not count as a recompilation of another's
        for seed in flags.seeds:
            if (change, seed) in runs:
                continue
            found = train(change, seed, flags_of_runs, runtime)
            runs[change, seed] = {"change": change, "seed": seed, **found, "flags": flags_of_runs}
            with flags.out.open("a") as file:
                file.write(json.dumps(runs[change, seed]) + "\n")
            print(f"{change}, seed {seed}: {found['val_loss']:.4f}", flush=True)
    differences: dict[str, list[float]] = {
        change: [runs[change, s]["val_loss"] - runs["none", s]["val_loss"] for s in flags.seeds]
        for change in changes[1:]
    }
    found_all = over_seeds.compare_all("none", differences, {})
    head, *rows = over_seeds.comparison_table(found_all)
    print("\n" + fmt.markdown_table(head, rows))
    return 0


if __name__ == "__main__":
    sys.exit(entry.run(main))
