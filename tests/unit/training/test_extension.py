"""Extensions observe a run at six moments; a failure of one is a warning and changes no number."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpt2lab.config.request import RunRequest
from gpt2lab.errors import ConfigError
from gpt2lab.runs import history
from gpt2lab.training.extension import Extension, LiveRun
from gpt2lab.training.pretrain import pretrain
from gpt2lab.training.start import Start
from tiny import parse

MOMENTS = ("requested", "resolved", "started", "recorded", "updating", "ended")


class Witness(Extension):
    """Notes what it is told, and fails at one moment if asked to."""

    def __init__(self, fails_at: str = "") -> None:
        self.heard: list[str] = []
        self._fails_at = fails_at

    def _hear(self, moment: str, detail: object = "") -> None:
        self.heard.append(f"{moment} {detail}".strip())
        if moment == self._fails_at:
            raise ConfigError(f"fails at {moment}") if moment == "requested" else ValueError("oh")

    def requested(self, request: RunRequest) -> None:
        self._hear("requested")

    def resolved(self, start: Start, runtime: Any, signals: Any) -> None:
        assert not start.run_dir.exists(), "nothing is written yet"
        self._hear("resolved")

    def started(self, run: LiveRun) -> None:
        assert run.folder.path.is_dir()
        self._hear("started")

    def recorded(self, event: Mapping[str, Any], result: object) -> None:
        self._hear("recorded", event["event"])

    def updating(self, step: int) -> None:
        self._hear("updating", step)

    def ended(self, reason: str | None, error: BaseException | None) -> None:
        self._hear("ended", reason or type(error).__name__)


def train(flags: list[str], name: str, *extensions: Extension) -> None:
    argv = [*flags, f"--run_name={name}", "--max_steps=2", "--sample_freq=0"]
    pretrain(parse(argv), extensions=extensions)


def losses(tmp_path: Path, name: str) -> list[float]:
    steps = history.read_log(tmp_path / "runs" / name).current_steps()
    return [event["loss"] for event in steps]


def test_a_run_tells_each_moment_in_order(tiny_flags: list[str]) -> None:
    witness = Witness()
    train(tiny_flags, "told", witness)
    heard = witness.heard
    assert heard[:3] == ["requested", "resolved", "started"]
    assert heard.index("recorded begin") < heard.index("updating 1")
    assert heard.index("updating 1") < heard.index("recorded step") < heard.index("updating 2")
    assert heard.index("recorded checkpoint") < heard.index("recorded done")
    assert heard[-1] == "ended NoneType", "a complete run has no reason and no error"


@pytest.mark.parametrize("moment", [m for m in MOMENTS if m != "requested"])
def test_a_failure_is_one_warning_and_changes_no_number(moment, tiny_flags, tmp_path, capsys):
    train(tiny_flags, "plain")
    capsys.readouterr()
    failing, other = Witness(moment), Witness()
    train(tiny_flags, "failing", failing, other)
    assert losses(tmp_path, "failing") == losses(tmp_path, "plain")
    assert other.heard[-1] == "ended NoneType"
    told = [line for line in "".join(capsys.readouterr()).splitlines() if "Witness" in line]
    assert len(told) == 1
    assert "ValueError: oh" in told[0]
    assert sum(line.startswith(moment) for line in failing.heard) == 1, "it is left out afterwards"


def test_a_request_can_be_rejected_and_the_last_error_is_told(tiny_flags, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="fails at requested"):
        train(tiny_flags, "rejected", Witness("requested"))
    assert not (tmp_path / "runs" / "rejected").exists(), "before anything is written"
    witness = Witness()
    monkeypatch.setenv("FAULT", "step:raise@2")
    with pytest.raises(RuntimeError):
        train(tiny_flags, "ends", witness)
    assert witness.heard[-1] == "ended RuntimeError"
