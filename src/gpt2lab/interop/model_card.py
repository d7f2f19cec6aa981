"""An exported model's README.md: what it is, its data, its measurements and its forecast. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gpt2lab import __version__, fmt
from gpt2lab.checkpoint.catalog import CheckpointInfo
from gpt2lab.config.settings import data_name, options_of
from gpt2lab.errors import printable
from gpt2lab.optim.schedule import describe_rates
from gpt2lab.runs import history
from gpt2lab.runs.target import Target
from gpt2lab.tokenizers.opening import why_no_text

_TEMPLATE = Path(__file__).with_suffix(".jinja")


def write_card(target: Target, folder: Path, numbers: dict[str, Any]) -> None:
    """Write README.md into `folder` with the numbers of the export; one that the run does not have is left out."""
    import jinja2

    shape, tokenizer = target.model_config(), target.tokenizer()
    rows = {
        "parameters": f"{numbers['parameters']:,}",
        "shape": f"{shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}, "
        f"context {shape.context_length}, vocabulary {shape.id_limit:,}",
    }
    source = f"the Hugging Face model `{target.name}`"
    if target.checkpoint is not None:
        manifest = target.checkpoint.manifest
        source = f"step {manifest['step']:,} of the run {_quoted(target.folder.parent.name)}"
        rows |= _trained_on(target.checkpoint) | _measured(target) | _forecast(target.folder.parent)
    problem = why_no_text(tokenizer, shape.vocab_size)
    rows["tokenizer"] = f"none: {problem}" if tokenizer is None or problem else tokenizer.describe()
    template = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).from_string(_TEMPLATE.read_text())
    card = template.render(
        **numbers,
        title=Path(numbers["out"]).name,
        version=__version__,
        source=source,
        options=options_of(shape),
        rows=rows,
        has_text=problem is None,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _trained_on(checkpoint: CheckpointInfo) -> dict[str, str]:
    config, manifest = checkpoint.config(), checkpoint.manifest
    rows = {}
    if manifest.get("initial_weights"):
        rows["initial weights"] = _quoted(manifest["initial_weights"]["init_from"])
    if rank := config.tuning.lora_r:
        rows["adapters"] = f"LoRA of rank {rank}, merged into the weights"
    return rows | {
        "training data": f"{_quoted(data_name(config))}, fingerprint {_quoted(manifest['data_fingerprint'])[:13]}`",
        "training tokens": f"{manifest['tokens']:,} in {manifest['step']:,} steps of "
        f"{config.batch.total_batch_size:,}, {config.system.dtype}",
        "optimizer": describe_rates(config.optim),
    }


def _quoted(text: str) -> str:
    """Quote text of a manifest, which anybody may have written, as code in one cell of a table."""
    return f"`{re.sub(r'[`|<>]', '?', printable(text))}`"


def _measured(target: Target) -> dict[str, str]:
    """Return the run's evaluations of this step; HellaSwag may be of an earlier step."""
    assert target.checkpoint is not None
    step, manifest = target.checkpoint.step, target.checkpoint.manifest
    log = history.read_log(target.folder.parent)
    rows = {}
    loss = log.current("eval").get(step)
    if loss is not None and loss["val_loss"] is not None:
        bits = loss.get("bits_per_byte")
        rows["validation loss"] = (
            f"{loss['val_loss']:.4f}{_error(loss['val_loss_se'])} nats/token"
            f"{'' if bits is None else f', {bits:.4f} bits/byte'} on {loss['val_tokens']:,} tokens"
        )
    elif manifest.get("val_loss") is not None:
        rows["validation loss"] = f"{manifest['val_loss']:.4f} nats/token"
    scores = {at: e for at, e in log.current("hellaswag").items() if at <= step}
    if scores:
        found = scores[max(scores)]
        note = "" if max(scores) == step else f", measured at step {max(scores):,}"
        rows["HellaSwag"] = (
            ", ".join(
                f"{name} {found[name]:.4f}{_error(found[f'{name}_se'])}"
                for name in ("acc", "acc_norm", "acc_token_norm")
            )
            + f" on {found['n']:,} items{note}"
        )
    return rows


def _forecast(run_dir: Path) -> dict[str, str]:
    """Return the planned time beside the actual one if the run's estimate.json has both."""
    content = history.read_json(run_dir / "estimate.json") or {}
    try:
        hours = [content["estimate"][f"{name}_hours"] for name in ("low", "estimated", "high")]
        hours.append(content["actual"]["hours"])
        low, value, high, spent = (fmt.duration(3600 * each) for each in hours)
        return {"time": f"planned {value} ({low} ... {high}), actual {spent}"}
    except (KeyError, TypeError):  # not there, not finished, or another version's
        return {}


def _error(value: float | None) -> str:
    return "" if value is None else f" +- {value:.4f}"
