"""Choose what a start computes with: device, precision, compilation and kernels."""

from __future__ import annotations

import dataclasses

from gpt2lab.config.derived import check_fsdp_param_dtype
from gpt2lab.distributed.compilation import resolve_compile, use_cache_folder
from gpt2lab.distributed.processor import FP16_ON_CPU
from gpt2lab.distributed.runtime import (
    Runtime,
    resolve_dtype,
    resolve_residual_dtype,
    use_fast_fp32_matmul,
)
from gpt2lab.distributed.strategy import Strategy
from gpt2lab.errors import ConfigError
from gpt2lab.model import attention_backend
from gpt2lab.model.gpt import GPT
from gpt2lab.training.start import Start


def choose_hardware(start: Start, runtime: Runtime) -> Start:
    """Choose the device and replace `auto` by what it means here, once, so that a resume keeps it.

    Raises: ConfigError if the settings need hardware that is missing, or if ranks would train in two precisions.
    """
    start = runtime.on_all_ranks(lambda: _choose_hardware(start, runtime))
    system = start.config.system
    choices = runtime.gather((runtime.device.type, system.dtype, system.compile))
    for rank, choice in enumerate(choices):
        if choice != choices[0]:
            raise ConfigError(
                f"rank {rank} would use {choice}, rank 0 {choices[0]} (device, dtype, compile); "
                f"set --device, --dtype and --compile so that all can follow"
            )
    return start


def _choose_hardware(start: Start, runtime: Runtime) -> Start:
    system, steps = start.config.system, start.plan.max_steps
    runtime.use(system)
    dtype = resolve_dtype(system.dtype, runtime.device)
    if system.fsdp_offload and runtime.device.type != "cuda":
        raise ConfigError(
            "fsdp_offload: moves weights from a GPU to the CPU's memory, and this run has no GPU; leave it out"
        )
    if system.attention != "auto" and runtime.device.type != "cuda":
        raise ConfigError(
            f"attention {system.attention}: is a GPU's kernel, and this run has no GPU; use --attention auto"
        )
    compiles, note = resolve_compile(system, device=runtime.device, max_steps=steps)
    slow = FP16_ON_CPU if dtype == "fp16" and runtime.device.type == "cpu" else None
    if compiles:
        use_cache_folder()
    if compiles and dtype == "fp32" and runtime.device.type == "cpu":
        use_fast_fp32_matmul()  # uncompiled fp32 stays the plain reference
    residual_dtype = system.residual_dtype
    if start.checkpoint is None or dtype == "bf16":  # a run that continues in fp32 keeps its own
        residual_dtype = resolve_residual_dtype(residual_dtype, dtype, runtime.device)
    system = dataclasses.replace(
        system, dtype=dtype, residual_dtype=residual_dtype, compile="on" if compiles else "off"
    )
    check_fsdp_param_dtype(system)
    config = dataclasses.replace(start.config, system=system)
    warnings = (*start.warnings, *filter(None, (note, slow)))
    return dataclasses.replace(start, config=config, warnings=warnings)


def check_kernels(start: Start, model: GPT, runtime: Runtime) -> Start:
    """On a GPU, compute attention once with the wanted kernel and note which one ran; a CPU has no choice.

    Compiled steps use our loss kernel if it computes the loss correctly here.

    Raises: ConfigError on all ranks, before the run has a folder.
    """
    if runtime.device.type != "cuda":
        return start
    config = start.config
    found = runtime.on_all_ranks(
        lambda: attention_backend.choose(
            config.system.attention,
            model,
            micro_batch=start.plan.batch.micro_batch,
            masked=config.tuning.instructions is not None,
            autocast=Strategy(runtime, config.system).autocast,
        )
    )
    slow = attention_backend.why_not_cudnn(found) if config.system.attention == "auto" else None
    start = dataclasses.replace(start, attention=found)
    warnings = [slow]
    if config.system.compile == "on":
        from gpt2lab.model import loss_kernel  # needs Triton, as compiling does

        warnings.append(loss_kernel.choose(model, config.system.dtype))
        start = dataclasses.replace(
            start, loss_kernel="triton" if model.loss_kernel else "inductor"
        )
    said = (*start.warnings, *(warning for warning in warnings if warning))
    return dataclasses.replace(start, warnings=said)
