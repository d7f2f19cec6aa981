"""Compare what a run needs at its peak, by category, with the memory that is free here.

Takes the flags of gpt2lab estimate that describe a run to come.

gpt2lab memory-check --model gpt2 --mini_batch_size 32
gpt2lab memory-check --model gpt2-xl --gpu H100
"""

from __future__ import annotations

import json

from gpt2lab import fmt
from gpt2lab.commands.parser import parse_flags
from gpt2lab.planner import hardware, reports
from gpt2lab.planner.ask import JobFlags, Predictor, check_job
from gpt2lab.planner.memory import PARTS
from gpt2lab.planner.reports import GIB

_COMMON = (  # flags of the short help
    *("model", "gpu", "gpus", "mini_batch_size", "context_length", "parallel"),
    *("activation_checkpointing", "data_dir", "json"),
)


def main(argv: list[str]) -> int:
    """Print the predicted peak by category against the free memory; return 3 if it does not fit.

    Raises: ConfigError for settings that cannot work.
    """
    ask = parse_flags(JobFlags, argv, about=__doc__, common=_COMMON)
    check_job(ask)
    predictor = Predictor(ask, hardware.load())
    profile = hardware.find_profile(ask.profile, predictor.hardware)
    job = predictor.job(profile)
    on, _ = predictor.machine_for(job)
    found = predictor.predict(job, profile, on=on)
    need, tensors = found.memory, found.memory.tensors
    code = 3 if need.fits is False else 0
    if ask.json:
        document = reports.as_json(found, profile_name=profile.name, window=None)
        print(json.dumps(document, allow_nan=False))
        return code
    model = job.config.model
    print(
        f"{model.model} {fmt.count(job.parameters)}, T {model.context_length}, micro-batch {job.micro_batch} x "
        f"accumulation {job.accumulation} x world {job.world_size}, {job.dtype}, on {found.machine.title}"
    )
    rows = [[part.replace("_", " "), f"{getattr(tensors, part) / GIB:.2f}"] for part in PARTS]
    rows += [["overhead", f"{need.overhead / GIB:.2f}"], ["total", f"{need.needed / GIB:.2f}"]]
    rows += [["free", "unknown" if need.available is None else f"{need.available / GIB:.2f}"]]
    print(fmt.table([f"at {tensors.peak_at}", "GiB"], rows))
    largest = need.largest_micro_batch
    if need.fits is None:
        print("the memory of this device is not known")
    elif need.fits:
        print(f"fits; the largest micro-batch that leaves {1 - need.target:.0%} free is {largest}")
    else:
        remedy = "not even one sequence at a time does; a smaller --model or --context_length may"
        if largest:
            remedy = f"--mini_batch_size {largest} does"
        print(f"does not fit into the {need.target:.0%} of it that a run may use; {remedy}")
    return code
