"""The precision of the residual stream is a run's own: over resumes, of older runs too, and in evaluate.py."""

import dataclasses

import pytest

from gpt2lab.distributed import runtime
from tiny import evaluated
from whole_run import Run


@pytest.fixture(scope="module")
def in_bf16(tiny_data, tmp_path_factory) -> Run:
    """Return a run whose stream is bf16, with the checkpoints of steps 2 and 4."""
    run = Run(tiny_data, tmp_path_factory.mktemp("residual"), "--eval_freq=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "fastest_dtype", lambda device: "bf16")  # emulated where it is not
        run.train("--dtype=bf16", "--residual_dtype=bf16", "--max_steps=4", "--checkpoint_freq=2")
    return run


def test_evaluate_repeats_the_numbers_of_a_bf16_stream_on_a_cpu(in_bf16, monkeypatch):
    monkeypatch.setattr(runtime, "fastest_dtype", lambda device: "bf16")
    checkpoint = in_bf16.checkpoints()[2]
    found = evaluated(str(checkpoint.path), in_bf16.path.parent)
    assert found.val_loss == checkpoint.val_loss
    # A checkpoint without the setting had an fp32 stream; by `auto` a resume on a GPU would change it without a word.
    config = {k: v for k, v in checkpoint.manifest["config"].items() if k != "residual_dtype"}
    older = dataclasses.replace(checkpoint, manifest=checkpoint.manifest | {"config": config})
    assert older.config().system.residual_dtype == "fp32"


def test_a_run_goes_on_in_fp32_where_there_is_no_bf16(in_bf16):
    """The stream's setting has no meaning there, so that it asks for nothing, and is kept."""
    in_bf16.train("--resume=2", "--dtype=fp32", "--allow_change=dtype", "--max_steps=4")
    config = in_bf16.checkpoints()[4].config()
    assert (config.system.dtype, config.system.residual_dtype) == ("fp32", "bf16")
