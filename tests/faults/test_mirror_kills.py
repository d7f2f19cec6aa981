"""kill -9 at any moment of copying to a mirror or of fetching from it; the next start is on another machine."""

from __future__ import annotations

import os
import random
import signal

import pytest
from harness import PACE, STEPS, FaultRun

pytestmark = pytest.mark.fault

SEED = int(os.environ.get("SEED", "1337"))


def test_killed_machines_leave_a_mirror_that_another_one_goes_on_from(
    tiny_data, tmp_path, reference
):
    (tmp_path / "bucket").mkdir()
    mirror = f"--checkpoint_mirror=file://{tmp_path / 'bucket'}"
    dice = random.Random(SEED)
    for machine, step in enumerate((dice.randrange(12, 17), dice.randrange(24, 30))):
        run = FaultRun(tiny_data, tmp_path / str(machine))
        process = run.start("--resume=auto", mirror, FAULT=PACE)
        run.wait_for(process, "step", step, machine + 1)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    run = FaultRun(tiny_data, tmp_path / "last")
    for point in ("download.model.safetensors", "download.manifest.json", "before_rename"):
        assert run.finish("--resume=auto", mirror, FAULT=f"mirror.{point}:kill9@*") == -9
        assert run.saved() == []
    assert (
        run.finish("--resume=auto", mirror, FAULT=f"mirror.upload.state.json:kill9@{STEPS}") == -9
    )
    assert not list((tmp_path / "bucket" / "run").glob(f"step_{STEPS:08d}-*/manifest.json"))
    last = FaultRun(tiny_data, tmp_path / "really_last")
    assert last.resume("--resume=auto", mirror) == 0, last.errors()
    assert last.status()["mirror"]["step"] == STEPS
    last.assert_equals(reference(1))
