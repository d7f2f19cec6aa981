"""How texts are drawn, see sample.py beside this: flags of scripts/sample.py and scripts/chat.py. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2lab.config.command_line import option
from gpt2lab.errors import ConfigError


@dataclass(frozen=True)
class Style:
    """How a text is drawn."""

    max_new_tokens: int = option(100, "most tokens of a text, without its prompt")
    temperature: float = option(1.0, "0 = always the likeliest token")
    top_k: int = option(50, "draw from the K likeliest tokens; 0 = from all")
    top_p: float = option(1.0, "of these, from the fewest that have this probability together")
    seed: int = option(1337, "same seed and same prompt, same text")


def refuse_style(style: Style) -> None:
    """Refuse what draws nothing.

    Raises: ConfigError.
    """
    for name, least in (("max_new_tokens", 1), ("top_k", 0), ("seed", 0)):
        if getattr(style, name) < least:
            raise ConfigError(f"{name} {getattr(style, name)} must be at least {least}")
    if not 0 <= style.temperature < float("inf"):
        raise ConfigError(f"temperature {style.temperature} must be 0 or above")
    if not 0 < style.top_p <= 1:
        raise ConfigError(f"top_p {style.top_p} must be above 0 and at most 1")
