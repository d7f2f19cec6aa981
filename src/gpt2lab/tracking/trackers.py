"""Experiment trackers: one interface, and W&B, trackio and MLflow behind it. No torch.

`place` says where the rows go, without secrets: a run that goes elsewhere is sent from its first event. `init` begins
or continues the tracker's run of an id, the same for every start; `log` takes rows; `finish` waits until they are kept.
Each class imports its library where it needs it, and raises whatever that raises. Where no key or address is set,
nothing leaves the machine.
"""

import contextlib
import importlib.util
import netrc
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PROJECT = "gpt2lab"  # where the library's own variable names no other
_SECRET = re.compile(r"(KEY|TOKEN|PASSWORD|SECRET)", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """The values of one event."""

    number: int  # counts all rows ever sent to the tracker's run, from 0
    step: int
    time: float  # Unix seconds
    values: dict[str, float | str]


MOST_ROWS = 50  # of a batch; a killed process has sent at most one that is not recorded


class WandB:
    """Weights & Biases. Its steps only go forward, so they count rows, and `training_step` is the axis."""

    label = "W&B"

    def place(self, run_dir: Path) -> str:
        """Return server and project, `offline` or `disabled`."""
        if self._is_offline() or os.environ.get("WANDB_MODE") == "disabled":
            return "offline" if self._is_offline() else "disabled"
        named = (os.environ.get("WANDB_ENTITY"), os.environ.get("WANDB_PROJECT", PROJECT))
        return "/".join(filter(None, [_bare(self._server()), *named]))

    def init(self, folder: Path, id: str, settings: dict[str, Any]) -> None:
        """Begin or continue the run; offline each start writes a folder of its own, under the same id."""
        import wandb

        offline = self._is_offline()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=id,
            name=folder.name,
            config=settings,
            dir=str(folder),
            mode="offline" if offline else None,
            resume=None if offline else "allow",
        )
        self._run.define_metric("training_step")
        self._run.define_metric("*", step_metric="training_step")

    def log(self, rows: Sequence[Row]) -> None:
        """Hand the rows to the library's own service."""
        for row in rows:
            self._run.log({"training_step": row.step, **row.values}, step=row.number)

    def finish(self) -> None:
        """Wait for the service."""
        self._run.finish()

    def _server(self) -> str:
        return os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")

    def _is_offline(self) -> bool:
        """Tell whether the user wants no network, or has given no key."""
        mode = os.environ.get("WANDB_MODE")
        if mode is not None:
            return mode in ("offline", "dryrun")
        if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
            return False
        with contextlib.suppress(OSError, RuntimeError, netrc.NetrcParseError):
            path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
            return netrc.netrc(path).authenticators(urlsplit(self._server()).netloc) is None
        return True


class Trackio:
    """trackio: an SQLite file on this machine, or a Space or server that its variables name."""

    label = "trackio"

    def place(self, run_dir: Path) -> str:
        """Return the project and the address or folder."""
        remote = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        folder = os.environ.get("TRACKIO_DIR")
        local = str(Path(folder).absolute()) if folder else "its own folder"
        return f"{self._project()} in {_bare(remote) if remote else local}"

    def init(self, folder: Path, id: str, settings: dict[str, Any]) -> None:
        """Begin or continue the run; its name holds the id, because trackio knows runs by name."""
        # The library warns where it loses rows, and continues. Its threads log nothing else.
        self._lost: list[str] = []
        warnings.showwarning = lambda message, *_, **__: self._lost.append(str(message))
        import trackio

        self._run = trackio.init(
            project=self._project(),
            name=f"{folder.name}-{id}",
            config=settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._lost.clear()  # about versions, or an address that it tries again

    def log(self, rows: Sequence[Row]) -> None:
        """Queue the rows; the library's thread writes them."""
        for row in rows:
            self._run.log(dict(row.values), step=row.step)
        self._reject_losses()

    def finish(self) -> None:
        """Wait for the thread."""
        self._run.finish()
        self._reject_losses()

    def _project(self) -> str:
        return os.environ.get("TRACKIO_PROJECT", PROJECT)

    def _reject_losses(self) -> None:
        if self._lost:
            raise RuntimeError(self._lost[0])


class MLflow:
    """MLflow: an SQLite file beside the runs, or the server that MLFLOW_TRACKING_URI names."""

    label = "MLflow"

    def place(self, run_dir: Path) -> str:
        """Return the experiment and the address."""
        return f"{self._experiment()} in {_bare(self._address(run_dir))}"

    def init(self, folder: Path, id: str, settings: dict[str, Any]) -> None:
        """Begin or continue the run that has the id as a tag; settings of its first start stay as they are."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        store = self._store(folder)
        if "MLFLOW_TRACKING_URI" not in os.environ:
            store.mkdir(exist_ok=True)
        self._client = client = MlflowClient(tracking_uri=self._address(folder))
        experiment = self._open_experiment(store)
        found = client.search_runs([experiment], f"tags.gpt2lab_id = '{id}'")
        if found:
            self._id, known = found[0].info.run_id, found[0].data.params
            client.update_run(self._id, status="RUNNING")
        else:
            tags = {"gpt2lab_id": id}
            created = client.create_run(experiment, tags=tags, run_name=folder.name)
            self._id, known = created.info.run_id, {}
        new = [Param(n, str(v)[:500]) for n, v in settings.items() if n not in known]
        for begin in range(0, len(new), 100):
            client.log_batch(self._id, params=new[begin : begin + 100])

    def log(self, rows: Sequence[Row]) -> None:
        """Write the numbers with the times of their events, and texts as files."""
        from mlflow.entities import Metric

        metrics = []
        for row in rows:
            for tag, value in row.values.items():
                if isinstance(value, str):
                    self._client.log_text(self._id, value, f"{tag}/step_{row.step:08d}.txt")
                else:
                    metrics.append(Metric(_as_name(tag), value, int(row.time * 1000), row.step))
        for begin in range(0, len(metrics), 1000):  # more at once are rejected
            self._client.log_batch(self._id, metrics=metrics[begin : begin + 1000])

    def finish(self) -> None:
        """Mark the run as ended; a later start opens it again."""
        self._client.set_terminated(self._id)

    def _experiment(self) -> str:
        return os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)

    def _store(self, run_dir: Path) -> Path:
        return run_dir.absolute().parent / "mlflow"

    def _address(self, run_dir: Path) -> str:
        ours = f"sqlite:///{self._store(run_dir) / 'mlflow.db'}"
        return os.environ.get("MLFLOW_TRACKING_URI", ours)

    def _open_experiment(self, store: Path) -> str:
        from mlflow.exceptions import MlflowException

        files = None if "MLFLOW_TRACKING_URI" in os.environ else (store / "artifacts").as_uri()
        found = self._client.get_experiment_by_name(self._experiment())
        if found is None:
            with contextlib.suppress(MlflowException):  # another run has just made it
                self._client.create_experiment(self._experiment(), artifact_location=files)
            found = self._client.get_experiment_by_name(self._experiment())
        if found is None:
            raise RuntimeError(f"the experiment {self._experiment()} could not be created")
        return str(found.experiment_id)


# By the name of the library.
LIBRARIES: dict[str, type[WandB | Trackio | MLflow]] = {
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}


def is_installed(name: str) -> bool:
    """Tell whether a library is installed, without importing it."""
    return importlib.util.find_spec(name) is not None


def without_secrets(text: str) -> str:
    """Return text without the logins of URLs, and without the values of variables that hold keys."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= 6:
            text = text.replace(value, "***")
    return re.sub(r"://[^/\s@]+@", "://***@", text)


def _bare(url: str) -> str:
    """Return an address without login and query, where tokens stand."""
    return re.sub(r"://[^/@]+@", "://", url).partition("?")[0]


def _as_name(tag: str) -> str:
    """Return a tag as MLflow takes it; the name of a data source may hold other characters."""
    return re.sub(r"[^\w\-. /:]", "_", tag, flags=re.ASCII)
