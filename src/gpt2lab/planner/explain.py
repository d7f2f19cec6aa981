"""Every formula with its numbers."""

from __future__ import annotations

from gpt2lab.config.schema import ModelConfig, Parallel
from gpt2lab.config.settings import options_of
from gpt2lab.model.counts import count_matmul_parameters
from gpt2lab.planner import communication
from gpt2lab.planner.estimate import Estimate
from gpt2lab.planner.hardware import Hardware
from gpt2lab.planner.interval import Z80
from gpt2lab.planner.timing import KINDS, muon_flops


def _count(model: ModelConfig) -> str:
    """Write what `count_parameters` adds up."""
    options = options_of(model)
    return f"counted with {options}" if options else "VC + TC + L(12 CC + 13 C) + 2C"


_HIDDEN: dict[Parallel, str] = {
    "ddp": "hidden behind {share:g} x 2/3 of the last micro-batch, except the embedding's {embedding:,.0f} MB",
    "zero1": "gradients hidden behind {share:g} x 2/3 of the last micro-batch, except the embedding's "
    "{embedding:,.0f} MB; new weights not",
    "fsdp": "hidden behind {share:g} of each micro-batch, except the first block's and what is outside the blocks",
}


def _communication(found: Estimate, link: str) -> str:
    """Write what travels, and behind what it is taken to hide."""
    job, model = found.job, found.job.config.model
    sent = communication.step_bytes(model, parallel=job.parallel, accumulation=job.accumulation)
    terms = [
        f"{kind.replace('_', '-')} {communication.wire_share(kind, world=job.world):.3g} x {size / 1e6:,.0f} MB"
        for kind, size in sent.items()
    ]
    hidden = _HIDDEN[job.parallel].format(
        share=communication.OVERLAP, embedding=4 * model.vocab_size * model.n_embd / 1e6
    )
    return (
        f"{' + '.join(terms)} over {link} = {found.communication_seconds * 1000:,.2f} ms, {hidden}"
    )


def lines(found: Estimate, known: Hardware) -> list[str]:
    """Return the derivation, line by line."""
    job, model, on = found.job, found.job.config.model, found.machine
    L, C, T, V = model.n_layer, model.n_embd, model.context_length, model.vocab_size
    matrices = count_matmul_parameters(model)
    text = [
        f"N       = {_count(model)}, V {V}, C {C}, T {T}, L {L} = {job.parameters:,}",
        f"N_mm    = 12 L CC + VC = {matrices:,}",
        f"F/token = 6 N_mm + 12 L C T = {job.flops_per_token:,}  (PaLM, arXiv:2204.02311 B)",
        f"run     = F/token x {job.tokens:,} tokens = {job.flops_per_token * job.tokens:.3g} FLOP",
    ]
    gpu = on.gpu
    if gpu is not None and gpu.peak_flops:
        best = gpu.matmul_flops
        measured = f"measured {best / 1e12:.0f}" if best else "no measured matmul: 0.9 of it"
        k = known.constants
        text.append(
            f"roofline: FLOPs / ({k['matmul_efficiency']:g} x matmul), {gpu.name} {gpu.peak_flops / 1e12:.0f} TFLOP/s, "
            f"{measured}; "
            f"({k['stream_bytes_per_token_layer_channel']:g} L C + {k['stream_bytes_per_logit']:g} V) bytes / "
            f"({k['bandwidth_efficiency']:g} x {(gpu.bandwidth or 0) / 1e9:.0f} GB/s)"
        )
    for kind, units, rate in zip(KINDS, job.work, on.rates.seconds_per_unit, strict=True):
        text.append(f"  {kind:<10} {units:.4g} x {rate:.4g} s = {units * rate * 1000:,.2f} ms")
    if job.config.optim.optimizer == "muon":
        text.append(f"  of matmul, Muon's 5 rounds: 5 x 60 L CCC = {muon_flops(model):.4g} FLOP")
    if found.communication_seconds and on.link is not None:
        text.append(_communication(found, on.link.title))
    need = found.memory.tensors
    optimizer = "AdamW 8 N" if job.config.optim.optimizer == "adamw" else "Muon and AdamW"
    text += [
        f"step    = {found.step.value * 1000:,.1f} ms; sigma of its logarithm {found.sigma:.3f}, "
        f"80 % = x/÷ e^({Z80:.2f} sigma)",
        f"memory  : 4 N {need.params:,} + {optimizer} {need.optimizer:,} + gradients {need.gradients:,} + bf16 copies "
        f"{need.bf16_weights:,} + activations {need.activations:,} + head {need.head:,} B at {need.peak_at}",
    ]
    text += [
        f"  {name:<10} {job.count(name) if name in ('eval', 'sample', 'hellaswag', 'checkpoint') else 1:>6,} "
        f"x {found.costs.seconds.get(name, 0):,.2f} s{' (measured)' if name in found.costs.measured else ''}"
        for name in ("start", "compile", "eval", "sample", "hellaswag", "checkpoint")
        if found.costs.seconds.get(name)
    ]
    if found.loss is not None:
        text.append(
            f"loss    = 1.8172 + 482.01/N^0.3478 + 2085.43/D^0.3658 (arXiv:2404.10102) + 0.27 (FineWeb) = "
            f"{found.loss.value:.3f}"
        )
    if found.cost is not None:
        text.append(
            f"cost    = ${found.cost.price_per_gpu_hour:g} x {on.processes} x {found.seconds.value / 3600:.2f} h"
        )
    return text
