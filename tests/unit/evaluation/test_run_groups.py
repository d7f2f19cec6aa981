"""Groups of runs that may not be compared: on other data, within a group and between two."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt2lab.errors import DataError
from gpt2lab.evaluation.run_groups import compare_groups, describe
from tiny import write_shards
from whole_run import Run


def test_losses_on_other_data_are_not_compared(tmp_path: Path) -> None:
    places = [
        write_shards(tmp_path / name, train=(1003,), val=(size,))
        for name, size in (("one", 650), ("other", 800))
    ]
    for seed in (1, 2):
        for name, data in zip("ab", places, strict=True):
            run = Run(data, tmp_path, "--max_steps=2", "--eval_freq=0", "--sample_freq=0")
            run.train(f"--run_name={name}_{seed}", f"--seed={seed}")
    with pytest.raises(DataError, match="were validated on other data, so their difference means"):
        compare_groups("a_*", "b_*", checkpoint_dir=tmp_path)
    with pytest.raises(DataError, match=r"a_1 was trained on the data \w{12} and b_2 on \w{12};"):
        compare_groups("a_1,b_2", "a_*", checkpoint_dir=tmp_path)
    found = compare_groups("a_*", "a_*", checkpoint_dir=tmp_path)
    assert (found.seeds, found.found.over_seeds.mean) == ((1, 2), 0)
    assert describe("a_*", "a_*", found).startswith("A  a_*, step 2\nB  a_*, step 2\n")
