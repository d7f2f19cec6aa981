"""HellaSwag items: download, read, check, tokenize in the field's two styles, take a subset. No torch.

Zellers et al. 2019, arXiv:1905.07830.
"""

from __future__ import annotations

import hashlib
import json
import queue
import re
import threading
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpt2lab import paths
from gpt2lab.errors import DataError, system_errors_as
from gpt2lab.files import read_regular, replace_durably
from gpt2lab.tokenizers.interface import Tokenizer

Style = Literal["harness", "tutorial"]
STYLES: tuple[Style, ...] = ("harness", "tutorial")

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
# As huggingface/datasets records it for this file: datasets/hellaswag/dataset_infos.json, download_checksums.
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
NUM_BYTES = 12_246_618
DEFAULT_PATH = Path("data/hellaswag/hellaswag_val.jsonl")  # in the repository

_CONNECT_SECONDS = 4.0  # the longest wait of a start without a network
_DOWNLOAD_SECONDS = 10.0  # the longest wait of a start with a slow network


@dataclass(frozen=True)
class Item:
    """One question: a context, four endings, and which of them is true."""

    context: str
    ctx_parts: tuple[str, str] | None  # the context's two halves, where the file has them
    activity: str
    endings: tuple[str, ...]  # four
    label: int


def fetch_hellaswag(
    path: Path | None = None,
    *,
    url: str = URL,
    sha256: str = SHA256,
    connect_seconds: float = _CONNECT_SECONDS,
) -> Path:
    """Return the file of the validation set; download it if it is missing. Its hash must be that of the original.

    The bytes of a download are flushed before one rename gives the file its name. A truncated or altered one leaves no
    file.

    Raises: DataError in one line that tells how to download it by hand.
    """
    path = path or paths.from_repository(DEFAULT_PATH)
    command = f"curl -L --create-dirs -o {paths.display_path(path)} {url}"
    by_hand = f"download it yourself ({command}) or give --hellaswag_path"

    def require_original(content: bytes, source: object, what_then: str) -> None:
        if (found := hashlib.sha256(content).hexdigest()) != sha256:
            raise DataError(
                f"{source}: {len(content):,} bytes with sha256 {found[:12]}..., expected {sha256[:12]}...: truncated "
                f"or altered, {what_then}; {by_hand}"
            )

    if path.exists():  # perhaps a download by hand that broke off
        with system_errors_as(DataError, path, what="cannot be read", fix=by_hand):
            require_original(
                read_regular(path, at_most=2 * NUM_BYTES, follow=True), path, "delete it"
            )
        return path
    content = _download(url, connect_seconds, by_hand)
    require_original(content, url, "not kept")
    with system_errors_as(DataError, path, what="cannot be written", fix=by_hand):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(path, content)
    return path


def _download(url: str, connect_seconds: float, by_hand: str) -> bytes:
    """Return what the URL holds, in bounded time; a thread does the work because name look-ups have no timeout."""
    answers: queue.Queue[bytes | Exception | None] = queue.Queue()

    def work() -> None:
        try:
            with urllib.request.urlopen(url, timeout=connect_seconds) as response:
                answers.put(None)  # the server answers: wait for the rest
                answers.put(response.read(2 * NUM_BYTES))
        except Exception as error:  # whatever the reason, there is no download
            answers.put(error)

    threading.Thread(target=work, name="hellaswag", daemon=True).start()
    try:
        answer = answers.get(timeout=connect_seconds)
        if answer is None:
            answer = answers.get(timeout=_DOWNLOAD_SECONDS)
    except queue.Empty:
        raise DataError(f"{url}: no answer in time; {by_hand}") from None
    if not isinstance(answer, bytes):
        raise DataError(f"{url}: cannot be downloaded ({answer}); {by_hand}")
    return answer


def read_items(path: Path) -> list[Item]:
    """Read items from a file with one JSON object a line.

    Raises: DataError naming file and line.
    """
    with system_errors_as(
        DataError,
        path,
        what="cannot be read as HellaSwag items",
        fix="give another --hellaswag_path (None: no HellaSwag)",
    ):
        lines = read_regular(path, at_most=1 << 30, follow=True).split(b"\n")
    items = [_parse(line, f"{path} line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise DataError(f"{path}: no HellaSwag items")
    return items


def _parse(line: bytes, where: str) -> Item:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}); a truncated file?") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object, so not a HellaSwag item")
    context, activity = (_text(row, name, where) for name in ("ctx", "activity_label"))
    parts = None
    if "ctx_a" in row and "ctx_b" in row:
        parts = (_text(row, "ctx_a", where), _text(row, "ctx_b", where))
    endings = row.get("endings")
    if not isinstance(endings, list) or len(endings) != 4:
        raise DataError(f"{where}: a HellaSwag item has a list of four `endings`")
    for number, ending in enumerate(endings):
        if not isinstance(ending, str) or not ending.strip():
            raise DataError(f"{where}: ending {number} is empty or no text")
    label = str(row.get("label", ""))  # a number in the original file, text on Hugging Face
    if label not in ("0", "1", "2", "3"):
        raise DataError(f"{where}: label {label!r} must be 0, 1, 2 or 3 (test splits have none)")
    return Item(context, parts, activity, tuple(endings), int(label))


def _text(row: dict[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise DataError(f"{where}: a HellaSwag item has a text `{name}`")
    return value


def tokenize(item: Item, style: Style, tokenizer: Tokenizer) -> tuple[list[np.ndarray], list[int]]:
    """Return the ids of an item's context and of its endings, and the characters of each ending.

    `harness`: activity label, capitalised second half, brackets cleaned, context and ending encoded as one text.
    Source: EleutherAI lm-evaluation-harness 0.4, lm_eval/tasks/hellaswag/utils.py and api/model.py (_encode_pair).
    `tutorial`: the plain context, each ending encoded by itself after a space. Source: karpathy/build-nanogpt,
    hellaswag.py. A context without a token becomes the end of text, as in the harness.

    Raises: DataError if an ending has no token of its own.
    """
    encode = tokenizer.encode
    if style == "tutorial":
        texts = list(item.endings)
        context = encode(item.context)
        endings = [encode(f" {text}") for text in texts]
    else:
        whole_context = item.context
        if item.ctx_parts is not None:
            whole_context = f"{item.ctx_parts[0]} {item.ctx_parts[1].capitalize()}"
        query = _clean(f"{item.activity}: {whole_context}")
        texts = [_clean(text) for text in item.endings]
        context = encode(query.rstrip())  # spaces at its end belong to the ending's first token
        endings = [encode(f"{query} {text}")[len(context) :] for text in texts]
    if not all(endings):
        text = texts[endings.index([])]
        raise DataError(
            f"HellaSwag: the ending {text!r} has no token of its own with {tokenizer.name}"
        )
    pieces = [context or [tokenizer.end_of_text], *endings]
    # Without the space before an ending.
    return [np.array(ids, tokenizer.dtype) for ids in pieces], [len(text) for text in texts]


def _clean(text: str) -> str:
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


@dataclass(frozen=True)
class Questions:
    """N items, tokenized in both styles."""

    labels: np.ndarray  # (N,) int64, which ending is true
    sequences: dict[Style, list[list[np.ndarray]]]  # of each item: ids of its context, four endings
    ending_chars: np.ndarray  # (N, 4) int64, of the harness text

    def __len__(self) -> int:
        return len(self.labels)

    def lengths(self, style: Style) -> np.ndarray:
        """Return the tokens of each context and of its endings, (N, 5) int64."""
        return np.array([[*map(len, texts)] for texts in self.sequences[style]])

    @property
    def fingerprint(self) -> str:
        """Hash the items: equal for equal items in equal order, from any file."""
        digest = hashlib.sha256(self.labels.astype("<i8").tobytes())
        for style in STYLES:
            digest.update(self.lengths(style).astype("<i8").tobytes())
            ids = np.concatenate([ids for texts in self.sequences[style] for ids in texts])
            digest.update(ids.astype("<u2" if ids.dtype == np.uint16 else "<u4").tobytes())
        return digest.hexdigest()

    def subset(self, limit: int) -> Questions:
        """Return a fixed random subset of `limit` items in their own order; all if there are no more, or for 0."""
        if not 0 < limit < len(self):
            return self
        chosen = np.sort(np.random.RandomState(0).permutation(len(self))[:limit])
        return Questions(
            self.labels[chosen],
            {style: [texts[i] for i in chosen] for style, texts in self.sequences.items()},
            self.ending_chars[chosen],
        )


def load_questions(path: Path, tokenizer: Tokenizer) -> Questions:
    """Return the items of a file as token ids.

    Raises: DataError naming file and line.
    """
    items = read_items(path)
    written = {style: [tokenize(item, style, tokenizer) for item in items] for style in STYLES}
    return Questions(
        labels=np.array([item.label for item in items]),
        sequences={style: [pieces for pieces, _ in found] for style, found in written.items()},
        ending_chars=np.array([chars for _, chars in written["harness"]]),
    )
