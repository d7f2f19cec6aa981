"""Debian's chromium, driven over its DevTools pipe as a person would: by keys, and with an eye on errors."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs: apt-get install chromium")
_PATIENCE = 100  # seconds, on a busy machine
_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, "")}


class Page:
    """A page, what it requested, and what went wrong in it."""

    def __init__(self, to: int, of: int) -> None:
        self._to, self._of, self._held, self._number = to, of, b"", 0
        self._session: dict[str, str] = {}
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result; note the events that come before it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (found := self._read()).get("id") != self._number:
            self._note(found)
        assert "error" not in found, found
        return found["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            part = os.read(self._of, 2**16)
            assert part, "the browser has ended"
            self._held += part
        line, _, self._held = self._held.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        what, params = event.get("method"), event.get("params", {})
        if what == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif what == "Runtime.exceptionThrown" or (
            what in ("Log.entryAdded", "Runtime.consoleAPICalled")
            and "error" in (params.get("type"), params.get("entry", {}).get("level"))
        ):
            self.errors.append(json.dumps(params))

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression holds."""
        deadline = time.monotonic() + _PATIENCE
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, (expression, self.errors)
            time.sleep(0.05)

    def open(self, address: str, colours: str = "light") -> None:
        """Open an address for a reader who prefers light or dark."""
        features = [{"name": "prefers-color-scheme", "value": colours}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=address)
        self.wait(f"location.href === {address!r} && document.readyState === 'complete'")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code, text = _KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def picture(self, path: Path) -> None:
        """Write what is seen, as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


def version() -> str:
    """Return the browser's version."""
    assert CHROMIUM is not None
    done = subprocess.run([CHROMIUM, "--version"], capture_output=True, text=True, check=True)
    return done.stdout.split()[1]


@contextlib.contextmanager
def page(profile: Path) -> Iterator[Page]:
    """Start the browser and yield an empty page."""
    assert CHROMIUM is not None
    (its_input, to), (of, its_output) = os.pipe(), os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
    # Chromium reads commands from descriptor 3 and writes to 4; a shell puts ours there.
    moves = f'exec "$@" 3<&{its_input} 4>&{its_output}'
    process = subprocess.Popen(
        ["bash", "-c", moves, "bash", CHROMIUM, *flags, f"--user-data-dir={profile}"],
        pass_fds=(its_input, its_output),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_input)
    os.close(its_output)
    try:
        yield Page(to, of)
    finally:
        process.kill()
        process.wait()
        os.close(to)
        os.close(of)
