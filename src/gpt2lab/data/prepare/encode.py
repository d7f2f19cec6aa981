"""Documents -> batches of ids, in order, by any number of worker processes."""

import contextlib
import hashlib
import itertools
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from types import ModuleType

import numpy as np

from gpt2lab.data.prepare.readers import BadRecordsError, Document, Stream
from gpt2lab.errors import DataError
from gpt2lab.tokenizers.interface import Tokenizer

CHUNK_CHARS = 1 << 20
LONGEST_WORD = 16 * CHUNK_CHARS
_BATCH_CHARS = 1 << 19
_IN_FLIGHT = 8  # batches per worker: enough to keep it busy while a shard is hashed and flushed


@dataclass(frozen=True)
class TextChunk:
    """A part of a document; `begins` marks its first, which the end-of-text id precedes."""

    text: str
    begins: bool


def cut(blocks: Iterable[str], *, where: str, cuts: re.Pattern[str] | None) -> Iterator[TextChunk]:
    """Cut a document, read in blocks of any length, into chunks of about a million characters.

    `cuts`: where the tokenizer allows it; None means nowhere. The ids of the chunks, joined, are exactly those of the
    full document. An empty document yields nothing.

    Raises: BadRecordsError on 16 million characters without a place to cut: not text.
    """
    held, begins = "", True
    for block in blocks:
        held += block
        while len(held) > CHUNK_CHARS:
            place = cuts.search(held, CHUNK_CHARS) if cuts else None
            if place is None:
                if len(held) > LONGEST_WORD:
                    problem = (
                        "characters without white space; probably not text"
                        if cuts
                        else "characters, but this tokenizer encodes a document as a whole; divide the document"
                    )
                    raise BadRecordsError(f"{where}: {len(held):,} {problem}")
                break
            yield TextChunk(held[: place.start()], begins)
            held, begins = held[place.start() :], False
    if held:
        yield TextChunk(held, begins)


@dataclass(frozen=True)
class EncodedChunks:
    """Chunks as ids: all of them, how many each chunk has, and keys."""

    ids: np.ndarray  # (n,) uint16 or uint32, the end-of-text id before each document
    lengths: np.ndarray  # (c,) int64
    begins: np.ndarray  # (c,) bool
    keys: np.ndarray  # (c,) uint64: a hash of the first chunk of a document


Batch = tuple[EncodedChunks, int, int]  # and how many bad and empty records were left out so far


class EncoderPool:
    """Processes that tokenize; with one, this process does it."""

    def __init__(self, count: int, tokenizer: Tokenizer) -> None:
        self._count, self._tokenizer = count, tokenizer
        self._workers = [_Worker(tokenizer) for _ in range(count)] if count > 1 else []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count)

    def encode(self, documents: Stream, *, skip_bad: bool) -> Generator[Batch, None, None]:
        """Yield documents as batches of chunks; they do not depend on the number of processes.

        Raises: DataError on a bad record (unless `skip_bad`, which counts it), or if a process dies.
        """
        with contextlib.closing(batch_chunks(documents, skip_bad, self._tokenizer.cuts)) as jobs:
            if not self._workers:
                for chunks, bad, empty in jobs:
                    yield encode_chunks(chunks, self._tokenizer), bad, empty
                return
            begun = ((self._threads.submit(self._on_idle, job[0]), *job[1:]) for job in jobs)
            waiting = deque(itertools.islice(begun, _IN_FLIGHT * self._count + 1))
            while waiting:
                future, bad, empty = waiting.popleft()
                yield future.result(), bad, empty
                waiting.extend(itertools.islice(begun, 1))

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.process.kill()  # ends a thread that waits for its answer
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _on_idle(self, chunks: list[TextChunk]) -> EncodedChunks:
        worker = self._idle.get()
        try:
            return worker.encode(chunks)
        finally:
            self._idle.put(worker)


_STARTING = threading.Lock()  # threads that prepare must not keep each other's stand-in of __main__


class _Worker:
    """A tokenizing process, on a pipe whose far end no other process holds.

    So when either side dies, the other reads an end of file, even within a message. The executors of the standard
    library share one pipe for all results, and wait forever for an answer of which a killed process wrote a part.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        context = get_context("spawn")  # a fork copies locks that threads of this process may hold
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=_work, args=(far_end, tokenizer), daemon=True)
        # The child would first run a script that calls `gpt2lab.prepare` again.
        with _STARTING:
            main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
            try:
                self.process.start()
            finally:
                sys.modules["__main__"] = main
        far_end.close()

    def encode(self, chunks: list[TextChunk]) -> EncodedChunks:
        try:
            self.pipe.send(chunks)
            answer: EncodedChunks | Exception = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise DataError(
                "a tokenizing process died (out of memory?); run the same line again with fewer --num_workers"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def _work(pipe: Connection, tokenizer: Tokenizer) -> None:
    """Answer each list of chunks with its ids; leave Ctrl+C to the parent, and end when it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Without the memory for a part of a message, the rest could not be told from the next one.
    with contextlib.suppress(EOFError, ConnectionError, MemoryError):
        while True:
            chunks = pipe.recv()
            try:
                pipe.send(encode_chunks(chunks, tokenizer))
            except Exception as error:  # raised again where the answer is awaited
                pipe.send(error)


def encode_chunks(chunks: list[TextChunk], tokenizer: Tokenizer) -> EncodedChunks:
    """Return some chunks as ids.

    Raises: DataError if the tokenizer has no ids for a text.
    """
    dtype = np.dtype(tokenizer.dtype)
    arrays, keys, texts = [np.empty(0, dtype)], [], []
    for chunk in chunks:
        try:
            content, text = chunk.text.encode("utf-8"), chunk.text
        except UnicodeEncodeError:  # half of a surrogate pair, from an escape in JSON
            content = chunk.text.encode("utf-8", "surrogatepass")
            text = chunk.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        keys.append(key_of(content) if chunk.begins else 0)
        texts.append(text)
    for chunk, ids in zip(chunks, tokenizer.encode_documents(texts), strict=True):
        arrays.append(np.full(chunk.begins + len(ids), tokenizer.end_of_text, dtype))
        arrays[-1][int(chunk.begins) :] = ids
    return EncodedChunks(
        ids=np.concatenate(arrays),
        lengths=np.array([len(ids) for ids in arrays[1:]], np.int64),
        begins=np.array([chunk.begins for chunk in chunks], bool),
        keys=np.array(keys, np.uint64),
    )


def key_of(content: bytes) -> int:
    """Return the key by which a document, or its first chunk, is held out or not."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


def batch_chunks(
    documents: Iterable[Document | BadRecordsError], skip_bad: bool, cuts: re.Pattern[str] | None
) -> Generator[tuple[list[TextChunk], int, int], None, None]:
    """Group chunks into batches of similar length in characters, whatever the documents.

    With each come the numbers of bad records and of empty documents so far; the last, without chunks, has the totals.
    """
    bad = empty = chars = 0
    held: list[TextChunk] = []
    for document in documents:
        is_empty = True
        try:
            if isinstance(document, BadRecordsError):
                raise document
            for chunk in cut(document.blocks, where=document.where, cuts=cuts):
                is_empty = False
                held.append(chunk)
                chars += len(chunk.text)
                if chars >= _BATCH_CHARS:
                    yield held, bad, empty
                    held, chars = [], 0
            empty += is_empty
        except BadRecordsError as error:  # also in the rest of a document that began well
            if not skip_bad:
                said = f"{error}; --skip_bad skips records that cannot be read"
                raise DataError(said) from None
            bad += error.records
    if held:
        yield held, bad, empty
    yield [], bad, empty
