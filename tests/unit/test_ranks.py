"""The tests' own launcher of ranks tells a failure as one, and leaves no rank behind."""

from __future__ import annotations

import json

import psutil

from launch import train_in_forks

PROGRAM = """
import json, os, sys, time
facts = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MINE")}
print(json.dumps({**facts, "argv": sys.argv[1:], "pid": os.getpid()}), flush=True)
if "fail" in sys.argv:
    if facts["RANK"] == "1":
        print("bad luck", file=sys.stderr)
        sys.exit(7)
    time.sleep(3600)
"""


def test_a_rank_that_fails_ends_the_others_and_gives_its_exit_code(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = train_in_forks(["fail"], world=2, program=tmp_path / "program.py")
    assert (done.returncode, done.stderr) == (7, "bad luck\n")
    for line in done.stdout.splitlines():
        assert not psutil.pid_exists(json.loads(line)["pid"])


def test_ranks_have_torchruns_environment_and_one_rank_has_none(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    for world, ranks in ((1, [None]), (2, ["0", "1"])):
        done = train_in_forks(["--a"], world=world, program=tmp_path / "program.py", MINE="x")
        assert (done.returncode, done.stderr) == (0, "")
        told = sorted(
            map(json.loads, done.stdout.splitlines()), key=lambda facts: str(facts["RANK"])
        )
        assert [facts["RANK"] for facts in told] == ranks
        for facts in told:
            assert facts["WORLD_SIZE"] == (None if world == 1 else "2")
            assert (facts["OMP_NUM_THREADS"], facts["MINE"], facts["argv"]) == ("1", "x", ["--a"])
