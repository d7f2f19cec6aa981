"""Measure this machine, side by side with other ways of doing the same. One verb per measurement.

gpt2lab benchmark codegen
gpt2lab benchmark codegen-parallel
gpt2lab benchmark data
gpt2lab benchmark first-card
gpt2lab benchmark hellaswag --hellaswag_path hellaswag_val.jsonl
gpt2lab benchmark parallel
gpt2lab benchmark planner
gpt2lab benchmark sample
gpt2lab benchmark save
gpt2lab benchmark step-overhead
gpt2lab benchmark cpu --model mid --peer nanogpt=../nanoGPT --peer hf
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.sizes import CPU_SIZES, VARIANTS, SizeName, StageName, VariantName
from gpt2lab.commands.parser import parse_flags
from gpt2lab.config.flags import option
from gpt2lab.config.presets import preset
from gpt2lab.config.schema import ActivationCheckpointing, ModelName, Optimizer, Parallel
from gpt2lab.errors import ConfigError


@dataclass(frozen=True)
class Codegen:
    """Count what torch.compile makes of GPT-2's step for a GPU, without one: kernels, bytes, registers."""

    architecture: tuple[Literal["sm_80", "sm_90", "sm_100"], ...] = option(
        ("sm_80", "sm_90"), "A100's, H100's and B200's, each a table of its own"
    )
    micro_batch: tuple[int, ...] = option((64, 32), "sequences of one forward pass, each a table")
    attention: Literal["cudnn", "flash", "efficient"] = option("cudnn", "kernel that is called")
    ddp_bucket_mb: float | None = option(
        None, "as a rank of several under DDP, with buckets of so many MiB; default one process"
    )
    layers: tuple[int, int] = option((2, 4), "layers that are compiled, to extrapolate from")
    model: ModelName = option(
        "gpt2", "shape of the model, to whose layers the count is extrapolated"
    )
    graphs: Literal["auto", "one", "regions"] = option(
        "auto", "how the step is compiled; auto = as the trainer does with so many layers"
    )
    loss: Literal["kernel", "compiled"] = option("kernel", "by our Triton kernel or torch.compile")
    json: Path | None = option(None, "also write the numbers to this file")


@dataclass(frozen=True)
class CodegenParallel:
    """Count graphs, recompiles and operators of a rank's step in each parallel mode, without a GPU or other ranks."""

    architecture: Literal["sm_80", "sm_90"] = option("sm_90", "A100's or H100's")
    mode: tuple[Parallel, ...] = option(("ddp", "zero1", "fsdp"), "parallel modes")
    activation_checkpointing: tuple[ActivationCheckpointing, ...] = option(
        ("none", "selective", "block"), "what the backward pass computes again"
    )
    layers: tuple[int, ...] = option((2,), "layers that are compiled")
    fsdp_param_dtype: Literal["fp32", "bf16"] = option(
        "fp32", "precision in which fsdp gathers the blocks' matrices"
    )
    json: Path | None = option(None, "also write the numbers to this file")


@dataclass(frozen=True)
class FirstCard:
    """Test and measure a machine's first GPU in stages, and write one file that can be sent: docs/cards/README.md."""

    out: Path = option(Path("first_card.json"), "JSON to write; a page in Markdown lies beside it")
    minutes: float = option(25.0, "for all stages; each has a share")
    from_: StageName = option("doctor", "continue --out with this stage and those after it")
    device: Literal["cuda", "cpu"] = option("cuda", "cpu: try the command on a tiny model")
    peer: tuple[str, ...] = option(
        (), "nanogpt=PATH (a checkout), to be measured beside ours", adds=True
    )


@dataclass(frozen=True)
class HellaSwag:
    """Score HellaSwag our way and as the tutorial lineage's four-rows loop does, in turns."""

    hellaswag_path: Path | None = option(None, "HellaSwag items; default: downloaded once")
    model: ModelName = option("gpt2", "shape of the model, with random weights")
    items: int = option(100, "items scored: a fixed random subset", least=1)
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = cuda if there is one")
    dtype: Literal["auto", "fp32", "bf16"] = option("fp32", "matmul precision of both")
    json: Path | None = option(None, "also write the numbers to this file")


@dataclass(frozen=True)
class Data:
    """Prepare text with 1 and 2 processes, as the tutorial lineage does, and with tiktoken alone; then load batches."""

    megabytes: int = option(300, "text, from Python's standard library, again and again")
    rounds: int = option(3, "times each way takes its turn")
    num_workers: tuple[int, ...] = option((1, 2), "numbers of processes")
    json: Path | None = option(None, "also write the numbers to this file")


@dataclass(frozen=True)
class Sample:
    """Draw a text with the cache, and by running all of it again for every token, in turns."""

    model: ModelName = option("gpt2", "shape of the model, with random weights")
    tokens: int = option(512, "length of the text")
    rounds: int = option(3, "times that each is measured")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto = cuda if there is one")
    dtype: Literal["auto", "fp32", "bf16"] = option("fp32", "matmul precision of both")
    json: Path | None = option(None, "also write the numbers to this file")


@dataclass(frozen=True)
class Sharing:
    """Train with one process and with several in each parallel mode, in turns: tokens/s a core, and what is sent."""

    model: ModelName = option("gpt2-nano", "shape of the model, with random weights")
    processes: int = option(2, "processes that share the CPU's cores, each its part")
    micro_batch: int = option(4, "sequences of one forward pass")
    micro_steps: int = option(8, "micro-batches of each process in a step")
    steps: int = option(5, "steps that are timed, of each kind")
    dtype: Literal["fp32", "bf16"] = option("fp32", "matmul precision of all")
    json: Path | None = option(None, "also write the numbers to this file")


@dataclass(frozen=True)
class Planner:
    """Predict the processor seconds of steps on one thread, from a probe and from other shapes, and take them."""

    probe_steps: int = option(40, "steps that a prediction rests on")
    steps: int = option(100, "steps that a probe predicts")
    json: Path | None = option(None, "also write the numbers to this file")


@dataclass(frozen=True)
class Save:
    """Save a checkpoint our way and with torch.save, in turns: seconds and bytes."""

    model: ModelName = option("gpt2", "shape of the model, with random weights")
    rounds: int = option(3, "times that each is measured")
    folder: Path | None = option(
        None, "an existing folder on the disk to write to; default the temporary one"
    )
    json: Path | None = option(None, "also write the numbers to this file")


@dataclass(frozen=True)
class StepOverhead:
    """Time what a step costs a rank's CPU outside the model, in each parallel mode, on gloo."""

    mode: tuple[Parallel, ...] = option(("ddp", "zero1", "fsdp"), "parallel modes, in turns")
    optimizer: Optimizer = option("adamw", "adamw | muon | normuon")
    layers: tuple[int, ...] = option((12, 48), "of GPT-2 124M and XL: 148 and 580 parameters")
    processes: int = option(2, "ranks, of one thread each")
    steps: int = option(30, "steps that are timed")
    json: Path | None = option(None, "also write the numbers to this file")


@dataclass(frozen=True)
class Cpu:
    """Take training steps on the CPU in turns with other trainers: ceilings, tokens/s, losses, memory."""

    model: tuple[SizeName, ...] = option(CPU_SIZES, "sizes, one table each")
    peer: tuple[str, ...] = option(
        (),
        "nanogpt=PATH, predecessor=PATH, litgpt=PATH (checkouts) or hf (installed); once for each",
        adds=True,
    )
    dtype: tuple[Literal["auto", "fp32", "bf16"], ...] = option(
        ("auto",), "precisions of our trainer, each a row of its own"
    )
    rounds: int = option(1, "times that each takes its turn; ours also ends the last round")
    warmup: int = option(4, "steps of each process that are not timed")
    steps: int = option(12, "steps of each process that are timed")
    limit_seconds: float = option(600.0, "give up on a process after so long")
    memory: bool = option(
        False, "also measure the peak of live tensor bytes, in processes of their own"
    )
    profile: bool = option(False, "also split a step into kinds of work, in processes of their own")
    variant: tuple[VariantName, ...] = option(
        (), "settings of our trainer that take their turns too, each against the default"
    )
    total_seconds: float | None = option(
        None, "for all of it: what would end later is left out, and said to be"
    )
    json: Path | None = option(None, "also write the numbers to this file")


@dataclass(frozen=True)
class Gpu(Cpu):
    """Take training steps on a GPU in turns with other trainers: ceilings, tokens/s, losses, memory."""

    sweep: bool = option(False, "all variants, the likeliest gains first")

    model: tuple[SizeName, ...] = option(("gpt2",), "sizes, one table each")
    warmup: int = option(10, "steps of each process that are not timed")
    steps: int = option(20, "steps of each process that are timed")


VERBS = {
    "cpu": Cpu,
    "gpu": Gpu,
    "codegen": Codegen,
    "codegen-parallel": CodegenParallel,
    "data": Data,
    "first-card": FirstCard,
    "hellaswag": HellaSwag,
    "parallel": Sharing,
    "planner": Planner,
    "sample": Sample,
    "save": Save,
    "step-overhead": StepOverhead,
}


def main(argv: list[str]) -> int:
    """Run one measurement and print it."""
    flags = parse_flags(VERBS, argv)
    if isinstance(flags, FirstCard):
        return _run_first_card(flags)
    if flags.json and (flags.json.is_dir() or not flags.json.absolute().parent.is_dir()):
        raise ConfigError(f"--json {flags.json}: no such folder, or a folder itself; name a file")
    measures: dict[type, Callable[[Any], tuple[dict[str, Any], str]]] = {
        Cpu: _measure_trainers,
        Gpu: _measure_trainers,
        Codegen: _count_generated_code,
        CodegenParallel: _count_parallel_steps,
        Data: _measure_data,
        HellaSwag: _measure_hellaswag,
        Planner: _measure_planner,
        Sample: _measure_sample,
        Sharing: _measure_sharing,
        Save: _measure_save,
        StepOverhead: _measure_step_overhead,
    }
    numbers, text = measures[type(flags)](flags)
    if text:
        print(text)
    if flags.json:
        flags.json.write_text(json.dumps(numbers, indent=1) + "\n")
    if isinstance(flags, Cpu):
        from benchmarks.trainers import check_all_ran

        check_all_ran(numbers)
    return 0


def _run_first_card(flags: FirstCard) -> int:
    from benchmarks import first_card
    from benchmarks.contestants import parse_peer
    from benchmarks.running import end_contestants_on_sigterm

    if flags.minutes <= 0:
        raise ConfigError(f"--minutes {flags.minutes:g} must be above 0")
    if not flags.out.absolute().parent.is_dir() or flags.out.is_dir():
        raise ConfigError(f"--out {flags.out}: no such folder, or a folder itself; name a file")
    if flags.out.suffix != ".json":
        raise ConfigError(f"--out {flags.out}: end it with .json; the page beside it ends with .md")
    peers = [parse_peer(peer) for peer in flags.peer]
    end_contestants_on_sigterm()
    return first_card.run_card(
        out=flags.out,
        minutes=flags.minutes,
        start=flags.from_,
        device=flags.device,
        peers=tuple(f"{name}={path}" if path else name for name, path in peers),
    )


def _measure_trainers(flags: Cpu) -> tuple[dict[str, Any], str]:
    from benchmarks import trainers
    from benchmarks.contestants import parse_peer
    from benchmarks.running import end_contestants_on_sigterm

    device: Literal["cpu", "cuda"] = "cuda" if isinstance(flags, Gpu) else "cpu"
    for name in ("rounds", "warmup", "steps"):
        if getattr(flags, name) < 1:
            raise ConfigError(f"--{name} {getattr(flags, name)} must be at least 1")
    for name in ("model", "dtype", "peer", "variant"):
        words = getattr(flags, name)
        if len({word.partition("=")[0] for word in words}) < len(words):
            raise ConfigError(f"--{name} {' '.join(words)}: names one twice")
    if flags.total_seconds is not None and flags.total_seconds <= 0:
        raise ConfigError(f"--total_seconds {flags.total_seconds:g} must be above 0")
    plan = trainers.Plan(
        models=flags.model,
        peers=tuple(parse_peer(text) for text in flags.peer),
        dtypes=flags.dtype,
        device=device,
        rounds=flags.rounds,
        warmup=flags.warmup,
        steps=flags.steps,
        limit_seconds=flags.limit_seconds,
        memory=flags.memory,
        profile=flags.profile,
        variants=tuple(VARIANTS) if isinstance(flags, Gpu) and flags.sweep else flags.variant,
        total_seconds=flags.total_seconds,
    )
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("torch sees no GPU; check the driver and nvidia-smi, or measure cpu")
    end_contestants_on_sigterm()
    return trainers.compare(plan, say=lambda line: print(line, flush=True)), ""


def _count_generated_code(flags: Codegen) -> tuple[dict[str, Any], str]:
    from benchmarks.cuda_codegen import report

    low, high = flags.layers
    if not 1 <= low < high:
        raise ConfigError(f"--layers {low} {high} must be two numbers from 1 up, the second larger")
    if not flags.micro_batch or min(flags.micro_batch) < 1:
        raise ConfigError("--micro_batch must be one or more numbers from 1 up")
    if not flags.architecture:
        raise ConfigError("--architecture must be some of sm_80, sm_90, sm_100")
    if flags.ddp_bucket_mb is not None and flags.ddp_bucket_mb < 1:
        raise ConfigError(f"--ddp_bucket_mb {flags.ddp_bucket_mb:g} must be at least 1")
    result = report.count(
        architectures=flags.architecture,
        micro_batches=flags.micro_batch,
        layers=flags.layers,
        model=flags.model,
        graphs=flags.graphs,
        attention=flags.attention,
        ddp_bucket_mb=flags.ddp_bucket_mb,
        loss=flags.loss,
    )
    return result, report.describe(result)


def _count_parallel_steps(flags: CodegenParallel) -> tuple[dict[str, Any], str]:
    from benchmarks.cuda_codegen import parallel

    if not flags.mode or not flags.activation_checkpointing:
        raise ConfigError("--mode and --activation_checkpointing take one or more words each")
    if not flags.layers or min(flags.layers) < 1:
        raise ConfigError("--layers must be one or more numbers from 1 up")
    cases = [
        parallel.ParallelCase(mode, recompute, layers, param_dtype=flags.fsdp_param_dtype)
        for mode in flags.mode
        for recompute in flags.activation_checkpointing
        for layers in flags.layers
    ]
    counted = parallel.generate(flags.architecture, cases)
    result = {"architecture": flags.architecture, "cases": counted}
    return result, parallel.describe(flags.architecture, counted)


def _measure_data(flags: Data) -> tuple[dict[str, Any], str]:
    from benchmarks import data

    for name in ("megabytes", "rounds"):
        if getattr(flags, name) < 1:
            raise ConfigError(f"{name} {getattr(flags, name)} must be at least 1")
    if not flags.num_workers or min(flags.num_workers) < 1:
        raise ConfigError("num_workers must be one or more numbers from 1 up")
    preparation = data.compare_preparation(
        megabytes=flags.megabytes, rounds=flags.rounds, workers=flags.num_workers
    )
    loader = data.measure_loader()
    return {"preparation": preparation, "loader": loader}, data.describe(preparation, loader)


def _measure_hellaswag(flags: HellaSwag) -> tuple[dict[str, Any], str]:
    from benchmarks import hellaswag
    from gpt2lab import paths
    from gpt2lab.evaluation.hellaswag_items import fetch_hellaswag

    typed = flags.hellaswag_path
    result = hellaswag.compare_with_tutorial(
        paths.from_working_directory(typed) if typed else fetch_hellaswag(),
        model_name=flags.model,
        items=flags.items,
        device=flags.device,
        dtype=flags.dtype,
    )
    return result, hellaswag.describe(result)


def _measure_sample(flags: Sample) -> tuple[dict[str, Any], str]:
    from benchmarks import sample

    if flags.tokens < 32 or flags.rounds < 1:
        raise ConfigError("--tokens must be at least 32 and --rounds at least 1")
    if flags.tokens > (most := preset(flags.model).model.context_length):
        raise ConfigError(f"--tokens {flags.tokens}: {flags.model} has a context of {most}")
    result = sample.compare_with_rerun(
        model_name=flags.model,
        tokens=flags.tokens,
        rounds=flags.rounds,
        device=flags.device,
        dtype=flags.dtype,
    )
    return result, sample.describe(result)


def _measure_planner(flags: Planner) -> tuple[dict[str, Any], str]:
    from benchmarks import planner

    for name in ("probe_steps", "steps"):
        if getattr(flags, name) < 1:
            raise ConfigError(f"--{name} {getattr(flags, name)} must be at least 1")
    result = planner.measure_planner(probe_steps=flags.probe_steps, steps=flags.steps)
    return result, planner.describe(result)


def _measure_sharing(flags: Sharing) -> tuple[dict[str, Any], str]:
    from benchmarks import sharing

    for name in ("micro_batch", "micro_steps", "steps"):
        if getattr(flags, name) < 1:
            raise ConfigError(f"{name} {getattr(flags, name)} must be at least 1")
    if flags.processes < 2:
        raise ConfigError(f"processes {flags.processes} must be at least 2")
    result = sharing.compare_modes(
        model_name=flags.model,
        world=flags.processes,
        micro_batch=flags.micro_batch,
        micro_steps=flags.micro_steps,
        steps=flags.steps,
        dtype=flags.dtype,
    )
    return result, sharing.describe(result)


def _measure_save(flags: Save) -> tuple[dict[str, Any], str]:
    from benchmarks import save

    if flags.rounds < 1:
        raise ConfigError(f"--rounds {flags.rounds} must be at least 1")
    if flags.folder is not None and not flags.folder.is_dir():
        raise ConfigError(f"--folder {flags.folder}: no such folder")
    result = save.compare_saves(model_name=flags.model, rounds=flags.rounds, folder=flags.folder)
    return result, save.describe(result)


def _measure_step_overhead(flags: StepOverhead) -> tuple[dict[str, Any], str]:
    from benchmarks import step_overhead

    if flags.steps < 1:
        raise ConfigError(f"--steps {flags.steps} must be at least 1")
    if flags.processes < 2:
        raise ConfigError(f"--processes {flags.processes} must be at least 2")
    if not flags.mode:
        raise ConfigError("--mode must be one or more of ddp, zero1, fsdp")
    if not flags.layers or min(flags.layers) < 1:
        raise ConfigError("--layers must be one or more numbers from 1 up")
    result = step_overhead.measure(
        modes=flags.mode,
        optimizer=flags.optimizer,
        layers=flags.layers,
        processes=flags.processes,
        steps=flags.steps,
    )
    return result, step_overhead.describe(result)
