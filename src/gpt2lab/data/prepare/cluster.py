"""Groups as tasks of a Ray cluster whose machines share the folder that they write to."""

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gpt2lab
from gpt2lab.data.prepare.encode import EncoderPool
from gpt2lab.data.prepare.work import Finished, Task, read_finished, run_task
from gpt2lab.errors import ConfigError, DataError

_ATTEMPTS = 3  # of a task whose worker dies
_SECONDS = 10  # in which a cluster answers
_HTTP2_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # an empty frame, of type 4
_PACKAGES = Path(gpt2lab.__file__).parents[1]  # where the workers find this program too


def run_on_ray(
    tasks: Sequence[Task],
    folder: Path,
    on_tokens: Callable[[int], object],
    *,
    address: str,
    cores: int,
) -> list[Finished]:
    """Run tasks on the cluster at `address`, each with `cores` processes; `on_tokens` is called when one is done.

    Raises: ConfigError if Ray is not installed or the cluster cannot be reached; DataError of a task.
    """
    with connected(address) as ray:
        largest = max((node["Resources"].get("CPU", 0) for node in ray.nodes()), default=0)
        if cores > largest:
            raise ConfigError(
                f"--num_workers {cores}: the cluster's largest machine offers {largest:g} processors to a task; "
                f"give at most that"
            )
        remote = ray.remote(num_cpus=cores, max_retries=_ATTEMPTS - 1)(_run)
        waiting = {remote.remote(task, folder, cores): task for task in tasks}
        done: dict[int, Finished] = {}
        try:
            while waiting:
                (ready,), _ = ray.wait(list(waiting), num_returns=1)
                task = waiting.pop(ready)
                try:
                    tokens = ray.get(ready)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause if isinstance(error.cause, DataError) else error from None
                except ray.exceptions.RayError as error:
                    reason = " ".join(str(error).split())[:300]
                    raise DataError(
                        f"group {task.group.number} was lost {_ATTEMPTS} times ({reason})"
                    ) from error
                on_tokens(tokens)
                done[task.group.number] = read_finished(folder / task.folder)
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)
        return [done[task.group.number] for task in tasks]


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Join the cluster at `address` for a while; yield the package ray.

    Raises: ConfigError if Ray is not installed or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--ray needs the ray package: pip install 'gpt2lab[ray]'") from error
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        _reach(os.environ.get("RAY_ADDRESS", "") if address == "auto" else address)
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": str(_PACKAGES)}},
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"--ray {address}: no Ray cluster at this address ({reason}); start one with: ray start --head"
        ) from error
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray has set its own
    try:
        yield ray
    finally:
        ray.shutdown()  # leaves the cluster


def _reach(address: str) -> None:
    """Ask HOST:PORT once for what a server of gRPC says first: Ray itself would try for minutes.

    Raises: OSError.
    """
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdigit():
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS) as server:
            if os.environ.get("RAY_USE_TLS") == "1":
                return
            server.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _HTTP2_SETTINGS)
            if server.recv(len(_HTTP2_SETTINGS))[3:4] != _HTTP2_SETTINGS[3:4]:
                raise OSError("something else answers")


def _run(task: Task, folder: Path, cores: int) -> int:
    counts: list[int] = []
    with contextlib.closing(EncoderPool(cores, task.tokenizer)) as pool:
        run_task(task, folder, pool, counts.append)
    return sum(counts)
