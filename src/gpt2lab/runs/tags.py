"""Under which tags TensorBoard and W&B show what a run recorded. No torch."""

from __future__ import annotations

from typing import Any

# event -> {field: (TensorBoard tag, factor)}
_SCALARS: dict[str, dict[str, tuple[str, float]]] = {
    "step": {
        "loss": ("Loss/train", 1.0),
        "lr": ("Learning_Rate/lr", 1.0),
        "grad_norm": ("Gradient/norm", 1.0),
        "step_seconds": ("Performance/step_time_ms", 1000.0),
        "tokens_per_second": ("Performance/tokens_per_sec", 1.0),
        "epoch": ("Training/epoch", 1.0),
        "elapsed_seconds": ("training/elapsed_hours", 1 / 3600),
        "remaining_seconds": ("training/remaining_hours", 1 / 3600),
        "on_track": ("training/on_track", 1.0),
    },
    "eval": {"val_loss": ("Loss/validation", 1.0)},
    "hellaswag": {"acc_norm": ("Evaluation/hellaswag_accuracy", 1.0)},
}


def tags_of(event: str, values: dict[str, Any]) -> dict[str, float | str]:
    """Return an event's numbers, and a sample's text, under the tags that mirrors show them by."""
    tags: dict[str, float | str] = {
        tag: values[name] * factor
        for name, (tag, factor) in _SCALARS.get(event, {}).items()
        if values.get(name) is not None
    }
    if event == "sample" and values.get("text") is not None:
        tags["Generated_Samples/text"] = values["text"]
    return tags
