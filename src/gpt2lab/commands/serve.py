"""Serve a model on this machine: OpenAI's completion API, and a page to try it in the browser.

gpt2lab serve my_tuned_run
gpt2lab serve latest --port 9000

One request is computed at a time. For many users, export the model and serve that
folder with vLLM. GPT2LAB_API_KEY in the environment: the token that clients send.
"""

import importlib.util
import ipaddress
import os
import signal
import socket
from dataclasses import dataclass
from typing import Any

from gpt2lab.commands.parser import AmongRuns, OnDevice, parse_flags
from gpt2lab.commands.sample import load
from gpt2lab.config.flags import TARGET, argument, option
from gpt2lab.errors import ConfigError
from gpt2lab.evaluation.completion import SamplingParams
from gpt2lab.runs.console import doing

_TOKEN = "GPT2LAB_API_KEY"


@dataclass(frozen=True)
class Serve(AmongRuns, OnDevice):
    """Serve a model on this machine: OpenAI's completion API, and a page to try it in the browser."""

    target: str = argument(TARGET)
    host: str = option("127.0.0.1", "address; another than this machine's needs GPT2LAB_API_KEY")
    port: int = option(8000, "http://HOST:PORT/; 0 = any free port")
    max_waiting: int = option(
        64, "requests that may wait for their turn; more are rejected", least=0
    )


def main(argv: list[str]) -> int:
    """Load the model and answer until Ctrl+C."""
    flags = parse_flags(Serve, argv)
    token = os.environ.get(_TOKEN)
    _check(flags, token)
    with listen(flags.host, flags.port) as listener:
        completer = load(flags, SamplingParams())
        from gpt2lab.serving.app import build_app
        from gpt2lab.serving.connections import server_of

        name = flags.target.rstrip("/").rpartition("/")[2]
        app, engine = build_app(
            completer, name, token=token, host=flags.host, max_waiting=flags.max_waiting
        )
        host = f"[{flags.host}]" if ":" in flags.host else flags.host
        address = f"http://{host}:{listener.getsockname()[1]}"
        server = server_of(app, flags.max_waiting)
        end = server.handle_exit

        def stop(number: int, frame: Any) -> None:
            engine.stop()
            end(number, frame)

        server.handle_exit = stop
        for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises the signal again at the end
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        print(
            f"{name}: {address}/ in a browser, {address}/v1 as OpenAI's API; Ctrl+C ends",
            flush=True,
        )
        with doing(""):
            server.run(sockets=[listener])
        engine.close()
    return 0


def _check(flags: Serve, token: str | None) -> None:
    """Reject what cannot be served, or not safely, before torch is loaded."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"no package {package}: pip install starlette uvicorn (the extra serve)"
            )
    if not 0 <= flags.port < 65536:
        raise ConfigError(f"port {flags.port} must be from 0 to 65535")
    if token is not None and not (token and token.isascii() and token.isprintable()):
        raise ConfigError(f"{_TOKEN} must be ASCII text, or unset")
    if token is None and not _is_local(flags.host):
        raise ConfigError(
            f"host {flags.host}: other machines could use the model; set {_TOKEN} to a token that clients must send, "
            f"or leave --host out and connect through ssh -L {flags.port}:localhost:{flags.port}"
        )


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises: ConfigError if the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ConfigError(
            f"port {port} of {host} cannot be used ({reason}); choose another, such as "
            f"--port {port + 1 if port < 65535 else 8000}"
        ) from error
