"""How the learning rate follows the batch: both rules' values, from one stated point of reference. No torch.

Square root for AdamW: Malladi et al. 2022 (arXiv:2205.10287). Linear: Goyal et al. 2017 (arXiv:1706.02677), for SGD.
"""

from __future__ import annotations

from typing import Any, Literal

from gpt2lab.config.presets import preset
from gpt2lab.config.schema import Config
from gpt2lab.planner.job import Job

Rule = Literal["sqrt", "linear", "none"]
CLAMP = (0.25, 2.0)  # times the reference: beyond, no rule was seen to hold
SURGE = 4.0  # times the reference batch, from which the best rate may fall again (arXiv:2405.14578)


def reference(config: Config) -> tuple[float, int]:
    """Return (rate, tokens a step) that the preset was set with."""
    base = preset(config.model.model)
    return base.optim.max_lr, base.batch.total_batch_size


def rates(config: Config) -> dict[str, float]:
    """Return each rule's rate for the batch, within the clamp."""
    rate, batch = reference(config)
    ratio = config.batch.total_batch_size / batch
    low, high = CLAMP
    return {
        "sqrt": rate * min(high, max(low, ratio**0.5)),
        "linear": rate * min(high, max(low, ratio)),
        "none": rate,
    }


def line(job: Job, rule: Rule, *, typed: bool) -> str:
    """Write the advice in one line."""
    config = job.config
    found, (rate, batch) = rates(config), reference(config)
    size = config.batch.total_batch_size
    name, space = (
        "learning rate",
        "" if typed else f"; --lr_rule {rule}: --max_lr {found[rule]:.2g}",
    )
    text = f"{name} {config.optim.max_lr:g} at {size:,} tokens a step{space}"
    text += f" (sqrt {found['sqrt']:.2g}, linear {found['linear']:.2g}; reference {rate:g} at {batch:,})"
    if size > SURGE * batch:
        text += f"; above {SURGE:g} times the reference batch the best rate may fall again"
    return text


def as_json(job: Job) -> dict[str, Any]:
    """Return the same as values."""
    rate, batch = reference(job.config)
    return rates(job.config) | {"reference_rate": rate, "reference_batch": batch}
