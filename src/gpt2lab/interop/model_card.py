"""An exported model's README.md: what it is, its data, its measurements and its forecast. No torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gpt2lab import __version__, fmt
from gpt2lab.config.settings import data_name, options_of
from gpt2lab.errors import printable
from gpt2lab.files import COUNT, OBJECT, STRING, list_of, mismatch, object_with
from gpt2lab.optim.schedule import describe_rates
from gpt2lab.runs import history
from gpt2lab.runs.target import Target
from gpt2lab.tokenizers.opening import why_no_text

_TEMPLATE = Path(__file__).with_suffix(".jinja")
_IMPORT = {"step": COUNT, "imported": STRING}


def write_card(target: Target, folder: Path, numbers: dict[str, Any]) -> None:
    """Write README.md into `folder` with the numbers of the export; one that the run does not have is left out."""
    import jinja2

    shape, tokenizer = target.model_config(), target.tokenizer()
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = _quoted
    card = environment.from_string(_TEMPLATE.read_text()).render(
        **numbers,
        title=Path(numbers["out"]).name,
        version=__version__,
        name=target.name,
        shape=shape,
        options=options_of(shape),
        tokenizer=tokenizer,
        problem=why_no_text(tokenizer, shape.vocab_size),
        **_facts(target),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _quoted(text: str) -> str:
    """Quote text of a manifest, which anybody may have written, as code in one cell of a table."""
    return f"`{re.sub(r'[`|<>]', '?', printable(text))}`"


def _facts(target: Target) -> dict[str, Any]:
    """Return what is known of the run: its evaluation of this step, and HellaSwag of this or an earlier one."""
    if target.checkpoint is None:
        return {"run": None}
    run_dir, step = target.folder.parent, target.checkpoint.step
    config, log = target.checkpoint.config(), history.read_log(run_dir)
    scores = {at: event for at, event in log.current("hellaswag").items() if at <= step}
    return {
        "run": run_dir.name,
        "manifest": target.checkpoint.manifest,
        "origin": _origin(target.folder),
        "config": config,
        "data": data_name(config),
        "rates": describe_rates(config.optim),
        "loss": log.current("eval").get(step),
        "scores": scores[max(scores)] if scores else None,
        "hours": _hours(run_dir),
    }


def _origin(folder: Path) -> dict[str, Any] | None:
    """Return {step, imported} of the file that a run's first weights were imported from, None if of none."""
    state = object_with({"history": list_of(OBJECT, "")}, "an object with a list of changes")
    content = history.read_json(folder / "state.json", {"state": state})
    changes = content["state"]["history"] if content else []
    return next((one for one in changes if mismatch(one, _IMPORT) is None), None)


def _hours(run_dir: Path) -> list[str]:
    """Return the least, planned and most time of the run's estimate.json, and the actual one, if it has all."""
    content = history.read_json(run_dir / "estimate.json") or {}
    try:
        hours = [content["estimate"][f"{name}_hours"] for name in ("low", "estimated", "high")]
        return [fmt.duration(3600 * each) for each in (*hours, content["actual"]["hours"])]
    except (KeyError, TypeError):  # not there, not finished, or another version's
        return []
