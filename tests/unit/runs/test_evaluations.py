"""Tasks that were measured on a run: kept by step, shown as long as the weights are those of the run."""

import json
import subprocess
import sys
from typing import Any

import launch
import plain_log
from gpt2lab.runs.evaluations import add_tasks, newest_tasks
from gpt2lab.runs.history import Log


def log_of(*attempts: tuple[int, int, int]) -> Log:
    """Return a log of starts (attempt, step it began after, step it reached)."""
    events: list[dict[str, Any]] = []
    for attempt, begin, end in attempts:
        events.append({"event": "begin", "attempt": attempt, "step": begin, "time": 0.0})
        events[-1] |= {"max_steps": 9, "world_size": 1}
        one = {"event": "step", "attempt": attempt, "time": 0.0, "loss": 1.0}
        events += [one | {"step": step} for step in range(begin + 1, end + 1)]
    return plain_log.log_of(events)


def test_each_task_shows_its_newest_evaluation(tmp_path):
    log = log_of((1, 0, 8))
    a, b, c, d = ({"n": n, "metrics": {}} for n in (1, 2, 3, None))
    add_tasks(tmp_path, log, 4, {"a": a, "b": b})
    for tasks in ({"b": c}, {"c": d}):
        add_tasks(tmp_path, log, 8, tasks)
    assert newest_tasks(tmp_path, log) == {"a": (4, a), "b": (8, c), "c": (8, d)}
    assert newest_tasks(tmp_path, log, 4) == {"a": (4, a), "b": (4, b)}


def test_weights_that_the_run_left_are_not_shown(tmp_path):
    """The second start goes back to step 4 and takes steps 5 to 8 again."""
    add_tasks(tmp_path, log_of((1, 0, 8)), 4, {"a": {"n": 1, "metrics": {}}})
    add_tasks(tmp_path, log_of((1, 0, 8)), 8, {name: {"n": 2, "metrics": {}} for name in "ab"})
    again = log_of((1, 0, 8), (2, 4, 8))
    assert newest_tasks(tmp_path, again) == {"a": (4, {"n": 1, "metrics": {}})}
    add_tasks(tmp_path, again, 8, {"a": {"n": 3, "metrics": {}}})
    assert newest_tasks(tmp_path, again) == {"a": (8, {"n": 3, "metrics": {}})}
    path = tmp_path / "evaluations" / "step_00000008.json"
    path.write_text("{")
    assert newest_tasks(tmp_path, again) == {"a": (4, {"n": 1, "metrics": {}})}
    add_tasks(tmp_path, again, 8, {"a": {"n": 4, "metrics": {}}})
    assert newest_tasks(tmp_path, again) == {"a": (8, {"n": 4, "metrics": {}})}
    assert path.with_suffix(".damaged").read_text() == "{"


def test_evaluations_of_one_step_at_once_lose_no_result(tmp_path):
    """Real processes, each of which adds tasks of its own as fast as it can."""
    program = (
        "import sys; from pathlib import Path; from gpt2lab.runs.evaluations import add_tasks\n"
        "from gpt2lab.runs.history import Log; task = {'n': None, 'metrics': {}}\n"
        "for n in range(40): add_tasks(Path(sys.argv[1]), Log(b''), 4, {f'{sys.argv[2]}{n}': task})"
    )
    words = [[sys.executable, "-c", program, str(tmp_path), name] for name in "abc"]
    running = [subprocess.Popen(each, env=launch.environment()) for each in words]
    assert [process.wait() for process in running] == [0, 0, 0]
    found = json.loads((tmp_path / "evaluations" / "step_00000004.json").read_text())["tasks"]
    assert sorted(found) == sorted(f"{name}{n}" for name in "abc" for n in range(40))
