"""What a run of a cluster leaves on the machine that started it; the cluster's answer is given, the copies are real."""

import sys
from types import SimpleNamespace
from typing import Any

from gpt2lab.checkpoint.catalog import list_checkpoints
from gpt2lab.lab.cluster import Cluster
from gpt2lab.lab.seed_runs import SeedRun
from gpt2lab.mirror.storage import Mirror, connect
from mirrors import commit, copy_to, new_run
from tiny import parse


class Ended:
    """The methods of Ray, whose every task has ended and written a log."""

    def remote(self, *_: Any, **__: Any) -> Any:
        return lambda _: SimpleNamespace(remote=lambda *_: "task")

    def wait(self, tasks: list[str], timeout: float) -> tuple[list[str], list[str]]:
        return tasks, []

    def get(self, _: str) -> tuple[int, str, dict[str, bytes]]:
        return 0, "", {"log.txt": b"step 2\n"}


def test_a_mirrored_run_is_fetched_without_a_word_on_standard_output(tmp_path, capsys, monkeypatch):
    """Several are fetched at a time: none may turn the program's standard output aside, even for a moment."""
    (tmp_path / "bucket").mkdir()
    url = f"file://{tmp_path / 'bucket'}"
    copy_to(connect(url, "a_seed1"), commit(new_run(tmp_path / "node" / "a_seed1"), 2))
    request = parse([f"--checkpoint_mirror={url}", "--data_dir=nowhere"])
    run = SeedRun("a", 1, request, tmp_path / "here")
    before, during, fetch = sys.stdout, [], Mirror.fetch

    def watched(*args: Any) -> Any:
        during.append(sys.stdout)
        return fetch(*args)

    monkeypatch.setattr(Mirror, "fetch", watched)
    Cluster(Ended()).start(run, {"OMP_NUM_THREADS": "1"}).communicate()
    assert (during, [info.step for info in list_checkpoints(run.folder)[0]]) == ([before], [2])
    assert (run.folder / "log.txt").read_text() == "step 2\n"
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("fetching step 2 (")
