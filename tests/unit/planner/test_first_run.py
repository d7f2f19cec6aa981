"""The command for a first run on new text: the preset and the length that suit its size and the machine."""

import pytest

from gpt2lab.planner.auto import choose_first_run

LAPTOP = {"gpt2-nano": 3e7, "gpt2-micro": 1.4e7, "gpt2-mini": 3.4e6, "gpt2": 3e5}
CARD = dict.fromkeys(LAPTOP, 2e9)  # tokens in half an hour
ALL = {"num_epochs": 3}
SMALL_STEPS = {"total_batch_size": 512, "mini_batch_size": 4}
TABLE = [  # text, its training tokens and those of its shortest shard, machine, what fits
    ("20 kB", 5_798, 250, LAPTOP, "gpt2-nano", ALL | SMALL_STEPS),
    ("20 kB in bytes", 19_001, 1_000, CARD, "gpt2-nano", ALL | SMALL_STEPS),
    ("1 MB", 324_084, 13_942, LAPTOP, "gpt2-micro", ALL),
    ("1 MB in bytes", 1_059_626, 55_769, CARD, "gpt2-micro", ALL),
    ("30 MB", 14_290_485, 386_965, LAPTOP, "gpt2-micro", {"max_tokens": "14M"}),
    ("30 MB", 14_290_485, 386_965, CARD, "gpt2-mini", ALL),
    ("1 GB", 285_000_000, 15_000_000, LAPTOP, "gpt2-micro", {"max_tokens": "14M"}),
    ("1 GB", 285_000_000, 15_000_000, CARD, "gpt2", ALL),
    ("100 GB", 10**10, 10**8, CARD, "gpt2", {"max_tokens": "2B"}),
    ("1 GB, a shard of few tokens", 285_000_000, 900, CARD, "gpt2-mini", ALL),
    ("no window", 2_000, 128, LAPTOP, None, {}),
    ("no step", 298, 200, LAPTOP, None, {}),
]


@pytest.mark.parametrize(
    ("tokens", "shortest", "machine", "model", "flags"),
    [row[1:] for row in TABLE],
    ids=[row[0] for row in TABLE],
)
def test_preset_and_length_suit_the_text_and_the_machine(tokens, shortest, machine, model, flags):
    """Without a window or a step there is no run."""
    found = choose_first_run(tokens, shortest, affordable=machine.__getitem__)
    assert found == ({"model": model, **flags} if model else {})
