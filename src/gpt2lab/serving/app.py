"""The HTTP side of `gpt2lab serve`: one model, one thread that generates, one request at a time.

The event loop only reads, checks and sends, so it answers while the model computes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import re
import threading
import traceback
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from gpt2lab.errors import first_line, is_out_of_memory
from gpt2lab.evaluation.completion import Completer
from gpt2lab.runs.target import was_tuned
from gpt2lab.serving.api import Choice, CompletionRequest, Problem, Reply, no_model, read_request
from gpt2lab.tokenizers.chat_template import can_be_written

_PAGE = Path(__file__).with_name("serve.html")
_MOST_BYTES = 2**20  # of a body
_BODY_SECONDS = 30.0
_LOCAL = {"localhost", "127.0.0.1", "::1"}


class Generation:
    """The texts of one request while they are generated: (prompt, its next ids) arrive in `rows`, then None."""

    def __init__(self) -> None:
        self.rows: asyncio.Queue[tuple[int, list[int]] | None] = asyncio.Queue()
        self.stopped = threading.Event()
        self.done: asyncio.Future[None]

    def stop(self) -> None:
        """End it before its next token, or before it begins."""
        self.stopped.set()
        self.done.cancel()
        self.rows.put_nowait(None)


class Engine:
    """The thread that generates texts, and the requests that wait for it."""

    def __init__(self, completer: Completer, max_waiting: int) -> None:
        self.completer, self.max_waiting = completer, max_waiting
        self.generations: set[Generation] = set()  # generating or waiting
        self._watchers: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="draw")
        self._thread.submit(int)  # a thread that cannot start is an error now

    def start(self, wanted: CompletionRequest, request: Request) -> Generation:
        """Queue a request; it ends when its client is gone.

        Raises: Problem if too many wait.
        """
        if len(self.generations) > self.max_waiting:
            message = f"{self.max_waiting} requests wait already; try again later"
            raise Problem(503, message, code="overloaded")
        request.state.is_accepted = True  # see connections.py
        generation, loop = Generation(), asyncio.get_running_loop()

        def tell(row: tuple[int, list[int]] | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(generation.rows.put_nowait, row)

        def work() -> None:
            try:
                for number, ids in enumerate(wanted.prompts):
                    # Every prompt's first choice is what `gpt2lab sample` draws with this seed.
                    drawn = self.completer.draw(ids, 0, list(range(wanted.n)), wanted.style)
                    with contextlib.closing(drawn):
                        while not generation.stopped.is_set() and (row := next(drawn, None)):
                            tell((number, row))
            finally:
                tell(None)

        generation.done = loop.run_in_executor(self._thread, work)
        self.generations.add(generation)
        generation.done.add_done_callback(lambda _: self.generations.discard(generation))
        watcher = asyncio.create_task(_stop_when_gone(generation, request))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return generation

    def stop(self) -> None:
        """Let every generation end before its next token; safe in a signal handler."""
        for generation in list(self.generations):
            generation.stopped.set()

    def close(self) -> None:
        """Stop all generations and wait for the thread."""
        self.stop()
        self._thread.shutdown(cancel_futures=True)


async def _stop_when_gone(generation: Generation, request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    generation.stop()


async def _texts(
    generation: Generation, wanted: CompletionRequest, choices: list[Choice]
) -> AsyncGenerator[tuple[Choice, str], None]:
    """Yield new text of the choices, and each choice at its end."""
    try:
        while (found := await generation.rows.get()) is not None:
            number, row = found
            of_prompt = choices[number * wanted.n : (number + 1) * wanted.n]
            for choice, id in zip(of_prompt, row, strict=True):
                had_ended = choice.finish
                new = choice.push(id)
                if new or choice.finish != had_ended:
                    yield choice, new
            if all(choice.finish for choice in choices):
                return
        await asyncio.wait([generation.done])
        if not generation.done.cancelled() and (error := generation.done.exception()):
            if not is_out_of_memory(error):
                raise error
            raise Problem(503, f"out of memory: {first_line(error)}", code="overloaded") from error
        raise Problem(503, "the server is shutting down")
    finally:
        generation.stop()


def build_app(
    completer: Completer, name: str, *, token: str | None, host: str, max_waiting: int
) -> tuple[Starlette, Engine]:
    """Return the application that serves a model under `name`, and its engine, to close at the end."""
    engine = Engine(completer, max_waiting)
    can_chat = was_tuned(completer.target) and can_be_written(completer.tokenizer)
    service = _Service(engine, name, token, host, can_chat)
    routes = [
        Route("/", _page),
        Route("/health", service.health),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.models),
        Route("/v1/completions", service.answer, methods=["POST"]),
        Route("/v1/chat/completions", service.answer, methods=["POST"]),
    ]
    handlers: Any = dict.fromkeys((Problem, HTTPException, Exception), _answer_error)
    return Starlette(routes=routes, exception_handlers=handlers), engine


@dataclass(frozen=True)
class _Service:
    """Answers the requests; `token` is what clients must send, None if any local client may ask."""

    engine: Engine
    name: str
    token: str | None
    host: str
    can_chat: bool

    def check(self, request: Request) -> None:
        """Reject a request without the token or, where none is set, one that another site sends through a browser."""
        if self.token is not None:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                why = "send the header Authorization: Bearer TOKEN"
                raise Problem(401, why, code="invalid_api_key")
            return
        asked = request.headers.get("host", "")
        if _host(f"//{asked}") not in _LOCAL | {self.host}:
            raise Problem(403, "the Host header is not this machine's name")
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != asked:
            raise Problem(403, "another site may not use this server")

    async def models(self, request: Request) -> Response:
        self.check(request)
        if (asked := request.path_params.get("name", self.name)) != self.name:
            raise no_model(asked, self.name)
        card = {"id": self.name, "object": "model", "created": 0, "owned_by": "gpt2lab"}
        card |= {"max_model_len": self.engine.completer.context_length, "can_chat": self.can_chat}
        return _json(card if request.path_params else {"object": "list", "data": [card]})

    async def health(self, request: Request) -> Response:
        told: dict[str, Any] = {"status": "ok"}
        with contextlib.suppress(Problem):
            self.check(request)
            told["requests"] = len(self.engine.generations)
        return _json(told)

    async def answer(self, request: Request) -> Response:
        self.check(request)
        is_chat = request.url.path == "/v1/chat/completions"
        if is_chat and not self.can_chat:
            why = f"{self.name} was not fine-tuned on conversations; use /v1/completions"
            raise Problem(400, why, param="model")
        try:
            content = await asyncio.wait_for(_body(request), _BODY_SECONDS)
        except asyncio.TimeoutError:
            raise Problem(408, f"no full body within {_BODY_SECONDS:.0f} s") from None
        except ClientDisconnect:
            raise Problem(400, "the body ended early") from None
        completer = self.engine.completer
        wanted = read_request(content, completer, self.name, is_chat=is_chat)
        generation, reply = self.engine.start(wanted, request), Reply(wanted, self.name)
        how = (completer.tokenizer, wanted.stop, wanted.style.max_new_tokens)
        choices = [
            Choice(index, *how, completer.before(wanted.prompts[index // wanted.n]))
            for index in range(len(wanted.prompts) * wanted.n)
        ]
        if wanted.stream:
            events = _events(generation, reply, choices)
            headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        async for _ in _texts(generation, wanted, choices):
            pass
        return _json(reply.full(choices))


def _host(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


async def _body(request: Request) -> bytes:
    content = b""
    async for part in request.stream():
        content += part
        if len(content) > _MOST_BYTES:
            raise Problem(413, f"the body is larger than {_MOST_BYTES} bytes")
    return content


async def _events(
    generation: Generation, reply: Reply, choices: list[Choice]
) -> AsyncIterator[str]:
    try:
        for document in reply.opening(choices):
            yield _event(document)
        async with contextlib.aclosing(_texts(generation, reply.wanted, choices)) as texts:
            async for choice, new in texts:
                yield _event(reply.chunk(choice, new))
        for document in reply.closing(choices):
            yield _event(document)
    except Problem as problem:  # the status has been sent
        yield _event(problem.body)
    except Exception:
        traceback.print_exc()
        yield _event(Problem(500, "the server failed; its terminal says why").body)
    yield "data: [DONE]\n\n"


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def _json(document: dict[str, Any], status: int = 200) -> Response:
    # ASCII: half of a surrogate pair, which a client may send and UTF-8 cannot, goes back as it came.
    return Response(json.dumps(document).encode(), status, media_type="application/json")


async def _answer_error(request: Request, error: Exception) -> Response:
    """Answer an error in OpenAI's shape: a Problem, starlette's own, or a bug, whose traceback starlette prints."""
    if isinstance(error, HTTPException):
        error = Problem(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    elif not isinstance(error, Problem):
        error = Problem(500, "the server failed; its terminal says why")
    response = _json(error.body, error.status)
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def _page(request: Request) -> Response:
    """Return the chat page; its policy allows its own style and script, by their hashes, and this server."""
    page = _PAGE.read_text(encoding="utf-8")
    style, script = (
        "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"
        for text in re.findall(r"<(?:style|script)>(.*?)</(?:style|script)>", page, flags=re.S)
    )
    policy = f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; "
    policy += "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
    headers |= {"referrer-policy": "no-referrer", "cache-control": "no-store"}
    return Response(page, headers=headers, media_type="text/html")
