"""The preset `speedrun` against the recorded run of the program that it repeats."""

import json

import pytest

from benchmarks.speedrun_recording import SHAPES, Shape, train_ours, write_tokens
from launch import REPOSITORY, slow

RECORDED = json.loads((REPOSITORY / "tests" / "golden" / "speedrun.json").read_text())
RECORDED_ALL = (("small", "fp32"), ("small", "bf16"), ("wide", "fp32"))


@pytest.mark.parametrize(
    ("name", "dtype", "steps"), [("small", "fp32", 8), *slow(*((*one, 60) for one in RECORDED_ALL))]
)
def test_the_preset_computes_what_the_program_did(name, dtype, steps, tmp_path):
    """Losses, validation losses at both ends, and weights at the end, by their norms."""
    run, shape = RECORDED["runs"][name], SHAPES[name]
    assert Shape(**run["shape"]) == shape
    expected, data = run[dtype], tmp_path / "data" / "tokens"
    write_tokens(data, shape)
    ours = train_ours(shape, data, dtype, f"--stop_after_steps={steps}")
    margin = 1e-5 if dtype == "fp32" else 5e-3
    assert ours.steps == pytest.approx(expected["losses"][:steps], rel=margin)
    ends = expected["val_losses"] if steps == shape.steps else expected["val_losses"][:1]
    assert ours.validation == pytest.approx(ends, rel=margin)
    if (dtype, steps) == ("fp32", shape.steps):
        assert ours.norms() == pytest.approx(expected["norms"], rel=1e-5)
