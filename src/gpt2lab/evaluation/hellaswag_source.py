"""Where HellaSwag's validation set comes from when nobody gives a file: fetched once, checked, kept. No torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
import urllib.request
import uuid
from pathlib import Path

from gpt2lab import paths
from gpt2lab.errors import DataError

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
# As huggingface/datasets records it for this file: datasets/hellaswag/dataset_infos.json, download_checksums.
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
NUM_BYTES = 12_246_618
DEFAULT_PATH = Path("data/hellaswag/hellaswag_val.jsonl")  # in the repository

_CONNECT_SECONDS = 4.0  # a start without a network waits no longer
_DOWNLOAD_SECONDS = 10.0  # nor one with a slow network


def fetch_hellaswag(
    path: Path | None = None,
    *,
    url: str = URL,
    sha256: str = SHA256,
    connect_seconds: float = _CONNECT_SECONDS,
    download_seconds: float = _DOWNLOAD_SECONDS,
) -> Path:
    """Return the file of the validation set, downloading it if it is not there yet.

    The file appears by one rename, after its hash was compared and its bytes were flushed; a truncated or altered
    download leaves nothing.

    Raises: DataError in one line that says what to do by hand.
    """
    path = path or paths.from_repository(DEFAULT_PATH)
    if path.exists():
        return path
    by_hand = f"download it yourself (curl -L --create-dirs -o {paths.for_people(path)} {url}) or give --hellaswag_path"
    content = _download(url, connect_seconds, download_seconds, by_hand)
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DataError(
            f"{url}: {len(content):,} bytes with sha256 {found[:12]}..., expected {sha256[:12]}...: truncated or "
            f"altered, not kept; {by_hand}"
        )
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise DataError(f"{path}: cannot be written ({error.strerror}); {by_hand}") from error
    return path


def _download(url: str, connect_seconds: float, download_seconds: float, by_hand: str) -> bytes:
    """Return what the URL holds, in bounded time: in a thread, because name look-ups know no timeout."""
    answers: queue.Queue[bytes | Exception | None] = queue.Queue()

    def work() -> None:
        try:
            with urllib.request.urlopen(url, timeout=connect_seconds) as response:
                answers.put(None)  # somebody answers: worth waiting for
                answers.put(response.read(2 * NUM_BYTES))
        except Exception as error:  # every kind means the same here: not to be had
            answers.put(error)

    threading.Thread(target=work, name="hellaswag", daemon=True).start()
    try:
        answer = answers.get(timeout=connect_seconds)
        if answer is None:
            answer = answers.get(timeout=download_seconds)
    except queue.Empty:
        raise DataError(f"{url}: no answer in time; {by_hand}") from None
    if not isinstance(answer, bytes):
        raise DataError(f"{url}: cannot be downloaded ({answer}); {by_hand}")
    return answer
