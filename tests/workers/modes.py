"""On each of several processes: what every parallel mode must do alike, compared with plain ddp.

modes.py FOLDER [cuda]
"""

import contextlib
import math
import sys
from pathlib import Path
from typing import Any, Literal, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import safetensors.torch
import torch

from benchmarks.sharing_worker import Traffic
from gpt2lab.checkpoint import manifest, store
from gpt2lab.checkpoint.store import TrainState
from gpt2lab.config.schema import ModelConfig, OptimConfig, Parallel, SystemConfig, TuningConfig
from gpt2lab.data.loader import GlobalBatch, MicroBatch
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.model.counts import count_rows
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.model.lora import add_lora, init_adapters
from gpt2lab.optim.optimizers import build_optimizers
from gpt2lab.training.health import check_drift
from gpt2lab.training.train_step import StepStats, is_finite, train_step

# Rows that neither 2 nor 3 processes can share evenly, and fewer rows than processes: the positions.
CONFIG = ModelConfig(n_layer=2, n_head=1, n_embd=7, context_length=2, vocab_size=11)
NAMES = ("adamw", "muon", "normuon")
OPTIM = {name: OptimConfig(weight_decay=0.5, optimizer=name) for name in NAMES}


class Trained:
    """A model on each of some ranks, and everything that a step of it needs."""

    def __init__(
        self,
        runtime: Runtime,
        system: SystemConfig,
        optim: OptimConfig,
        *,
        model: ModelConfig = CONFIG,
        lora: bool = False,
        scatters: bool = False,
        seed: int = 0,
    ) -> None:
        self.runtime, self.config, self.system = runtime, model, system
        self.strategy = Strategy(runtime, system)
        if scatters:  # as always on GPUs
            self.strategy._scatters = True
        self.model = build_model(model, seed=seed, device=runtime.device)
        if lora:
            add_lora(self.model, TuningConfig(instructions="demo", lora_r=4))
            init_adapters(self.model, seed=seed)
        self.wrapped = self.strategy.prepare(self.model)
        optimizers = build_optimizers(self.model, optim)
        self.optimizers = self.strategy.shard_optimizer_state(self.model, optimizers)

    def step(
        self,
        number: int,
        *,
        rows: int = 1,
        accumulation: int = 2,
        grad_clip: float = 0.1,
        rejected_by: Literal["host", "device"] | None = None,
    ) -> StepStats:
        rank, world, T = self.runtime.rank, self.runtime.world_size, self.config.context_length
        micro = []
        for place in range(accumulation):
            index = rank + place * world
            generator = torch.Generator().manual_seed(100 * number + index)
            ids = torch.randint(0, self.config.vocab_size, (rows, T + 1), generator=generator)
            ids, is_last = ids.to(self.runtime.device), place == accumulation - 1
            micro.append(MicroBatch(ids[:, :-1], ids[:, 1:], index, is_last))
        samples = rows * accumulation * world
        # Divided by NaN, the loss and all gradients are NaN.
        targets: Any = math.nan if rejected_by == "device" else samples * T
        # As in training; None: the device decides.
        accept = is_finite if self.system.fsdp_offload else None
        return train_step(
            self.wrapped,
            self.optimizers,
            GlobalBatch(tuple(micro), targets, 0, 0, samples, None, 0.0),
            1e-2,
            strategy=self.strategy,
            grad_clip=grad_clip,
            seed=number,
            accept=accept if rejected_by != "host" else lambda loss, norm: False,
        )

    def weights(self) -> dict[str, torch.Tensor]:
        content = store.collect(self.model, self.optimizers, keep=True)
        return {**content.model, **content.optimizer}

    def save(self, folder: Path, step: int) -> Path:
        """Save a checkpoint in a new folder and return it."""
        content = store.collect(self.model, self.optimizers, keep=self.runtime.rank == 0)
        if self.runtime.rank == 0:
            folder.mkdir()
            what = {"kind": "rolling", "state": TrainState(step), "rng_states": [], "facts": {}}
            drafted = store.draft(folder, content=content, **what)
            manifest.commit(folder, drafted)
        else:
            assert not content.model
            assert not content.optimizer
        self.runtime.gather(None)
        return folder / f"step_{step:08d}"

    def load(self, saved: Path) -> None:
        """Load a checkpoint after a step from elsewhere: what is saved then is the same, byte for byte."""
        self.step(1)
        store.load(saved, model=self.model, optimizers=self.optimizers)
        out = store.collect(self.model, self.optimizers, keep=True)
        assert safetensors.torch.save(out.model) == (saved / "model.safetensors").read_bytes()
        assert safetensors.torch.save(out.optimizer) == (saved / "optim.safetensors").read_bytes()


def in_mode(runtime: Runtime, mode: str, optimizer: str, seed: int = 0) -> Trained:
    parallel, _, more = mode.partition(" ")
    offloads = more == "offloaded"
    system = SystemConfig(dtype="fp32", parallel=cast(Parallel, parallel), fsdp_offload=offloads)
    scatters = more == "scattered"
    trained = Trained(runtime, system, OPTIM[optimizer], scatters=scatters, seed=seed)
    trained.strategy.warm_up_reducer(trained.wrapped, batch_size=1, context_length=2)
    return trained


def compare(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], *, exact: bool = True
) -> None:
    rtol, atol = (0.0, 0.0) if exact else (1e-4, 1e-6)
    assert list(one) == list(other)
    for name in one:
        assert one[name].shape == other[name].shape, name
        torch.testing.assert_close(one[name], other[name], rtol=rtol, atol=atol)


def main(folder: Path, device: str = "cpu") -> None:
    runtime = Runtime()
    if device == "cuda":
        runtime.use(SystemConfig(device="cuda"))
    for optimizer in OPTIM:
        compare_modes(folder / optimizer, runtime, optimizer)
    runtime.close()


def compare_modes(folder: Path, runtime: Runtime, optimizer: str) -> None:
    plain = in_mode(runtime, "ddp", optimizer)
    stats = [plain.step(number) for number in (1, 2, 3)]
    assert stats[0].grad_norm > 0.1, "the clip must bite"
    expected = plain.weights()
    saved = plain.save(folder, 3)

    for mode in ("zero1", "zero1 scattered", "fsdp", "fsdp offloaded"):
        here = in_mode(runtime, mode, optimizer)
        for number, other in zip((1, 2, 3), stats, strict=True):
            before = here.weights()
            here.step(number, rejected_by="host")  # a rejected update leaves nothing behind
            compare(here.weights(), before)
            found = here.step(number)
            assert math.isclose(found.loss, other.loss, rel_tol=1e-6)
            assert math.isclose(found.grad_norm, other.grad_norm, rel_tol=1e-5)
            before = here.weights()
            assert not here.step(number, rejected_by="device").updated
            compare(here.weights(), before)
        compare(here.weights(), expected, exact=False)
        check_drift(here.model, runtime, 3)
        with contextlib.ExitStack() as entered:
            with Traffic() as traffic:
                model = entered.enter_context(here.strategy.full_model(here.model))
            # So few weights are one message.
            assert traffic.calls == ({"all_gather": 1} if "fsdp" in mode else {})
            assert type(model) is GPT
            weights = here.weights()
            content = {name: weights[name] for name, _ in here.model.named_parameters()}
            compare({name: p.cpu() for name, p in model.named_parameters()}, content)
        assert store.has_sharded_state(here.model, here.optimizers)
        held = sum(
            (value.to_local() if hasattr(value, "to_local") else value).numel()
            for optimizer in here.optimizers
            for state in optimizer.state.values()
            for value in state.values()
        )
        total = sum(value.numel() for name, value in expected.items() if "/" in name)
        assert held < 0.8 * total or runtime.world_size == 1, "this process holds all of the state"
        if mode == "zero1 scattered":
            check_traffic(here, optimizer)
        if mode == "fsdp offloaded":
            assert all(p.to_local().device.type == "cpu" for p in here.model.parameters())

        in_mode(runtime, mode, optimizer, seed=1).load(saved)
        # One write, where print makes two.
        sys.stdout.write(f"{mode} agrees with {optimizer}\n")


def check_traffic(trained: Trained, optimizer: str) -> None:
    """Compare what a step sends with what it must: each gradient to the rank that needs it, each new weight to all."""
    world = trained.runtime.world_size
    sizes = ((len(p), p[0].numel()) for p in trained.model.parameters())
    padded = sum(4 * world * math.ceil(rows / world) * each for rows, each in sizes)
    with Traffic() as traffic:
        trained.step(4)
    numbers = 4 + 8  # loss and norm
    if optimizer == "normuon":
        numbers += 4 * count_rows(CONFIG)
    sent = {"reduce_scatter": padded, "all_gather": padded, "all_reduce": numbers}
    assert dict(traffic.bytes) == sent, traffic.bytes


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
