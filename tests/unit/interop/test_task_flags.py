"""Flags of evaluate --tasks that are rejected before anything is loaded."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec

import pytest

from gpt2lab.commands.evaluate import main
from gpt2lab.errors import ConfigError
from gpt2lab.interop import tasks as harness
from gpt2lab.interop.tasks import TaskRequest


def test_flags_of_tasks_are_checked_before_anything_is_loaded(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^--limit is for --tasks; give its names too$"):
        main(["nobody", "--limit=3"])
    with pytest.raises(ConfigError, match=r"--hellaswag_limit$"):
        main(["nobody", "--hellaswag", "--limit=3"])
    with pytest.raises(ConfigError, match=r"^limit 0 must be at least 1$"):
        main(["nobody", "--tasks=piqa", "--limit=0"])
    real = importlib.util.find_spec
    known = {"lm_eval": ModuleSpec("lm_eval", None, is_package=True)}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: known.get(name) or real(name))
    with pytest.raises(ConfigError, match=r"^--tasks_path \S+: no such folder, or no task in it"):
        harness.require_tasks(TaskRequest("piqa", tasks_path=tmp_path))
    (tmp_path / "some.yaml").write_text("tag: [all, others]\ntask: own_task\n")
    for names in ("own_task", "others, own_task"):
        harness.require_tasks(TaskRequest(names, tasks_path=tmp_path))
    for names, said in (("own", "own"), ("own_task,own_tusk", "own_tusk: .*own_task"), (",", "")):
        with pytest.raises(ConfigError, match=rf"^--tasks:? ?{said}"):
            harness.require_tasks(TaskRequest(names, tasks_path=tmp_path))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'gpt2lab\[lm-eval\]'$"):
        harness.require_tasks(TaskRequest("piqa"))
