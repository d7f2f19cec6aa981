"""gpt2lab serve: what a request may ask, who may ask, and that a text does not depend on who else asks."""

import contextlib
import http.client
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import launch
import served
from gpt2lab.commands.verbs import main
from gpt2lab.errors import ConfigError
from gpt2lab.evaluation.completion import Completer, SamplingParams, check_sampling
from gpt2lab.serving import connections
from gpt2lab.serving.api import Choice
from gpt2lab.tokenizers.gpt2 import GPT2
from served import CONTEXT, answer, ask, events

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Count 3"}]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return served.train(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def tuned(runs) -> Completer:
    return served.completer(runs, "tuned")


@pytest.fixture(scope="module")
def port(tuned) -> Iterator[int]:
    with served.in_thread(tuned) as port:
        yield port


def text(port: int, **more: Any) -> Any:
    return answer(port, TEXT, {"model": "tuned", "prompt": "Hello", "seed": 7, **more})


def test_a_completion_is_the_text_that_sample_draws(port, runs):
    found = text(port, max_tokens=12, temperature=0.8, top_p=0.9)
    flags = ["--prompt=Hello", "--seed=7", "--max_new_tokens=12", "--temperature=0.8"]
    words = (*flags, "--top_p=0.9", f"--checkpoint_dir={runs}", "--device=cpu")
    done = launch.call("sample.py", "tuned", *words)
    (choice,) = found["choices"]
    assert (f"Hello{choice['text']}\n", choice["finish_reason"]) == (done.stdout, "length")
    assert found["usage"] == {"prompt_tokens": 1, "completion_tokens": 12, "total_tokens": 13}
    ids = GPT2.encode("Hello")
    assert text(port, max_tokens=12, temperature=0.8, top_p=0.9, prompt=ids)["choices"] == [choice]


def test_prompts_and_choices_are_numbered_and_do_not_depend_on_their_place(port):
    many = text(port, prompt=["Hello", "you"], n=3, max_tokens=4, temperature=0)["choices"]
    assert [one["index"] for one in many] == list(range(6))
    for place, prompt in ((0, "Hello"), (3, "you")):
        (alone,) = text(port, prompt=prompt, max_tokens=4, temperature=0)["choices"]
        assert [one["text"] for one in many[place : place + 3]] == [alone["text"]] * 3
    drawn = text(port, n=3, max_tokens=8)["choices"]
    assert len({one["text"] for one in drawn}) == 3


def test_a_stream_joined_is_the_answer_in_one(port):
    body = {"model": "tuned", "seed": 3, "n": 2, "max_tokens": 20, "temperature": 2}
    for path, more in ((TEXT, {"prompt": "Hi"}), (CHAT, {"messages": HELLO})):
        full = answer(port, path, body | more)
        wanted = {"stream": True, "stream_options": {"include_usage": True}}
        status, headers, stream = ask(port, "POST", path, body | more | wanted)
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        *chunks, last = events(stream)
        assert (last["choices"], last["usage"]) == ([], full["usage"])
        assert all(chunk["usage"] is None for chunk in chunks)
        assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
        for choice in full["choices"]:
            parts = [one for chunk in chunks for one in chunk["choices"]]
            parts = [one for one in parts if one["index"] == choice["index"]]
            if path == CHAT:
                assert parts[0]["delta"] == {"role": "assistant", "content": ""}
                joined = "".join(one["delta"].get("content", "") for one in parts)
                assert joined == choice["message"]["content"]
            else:
                assert "".join(one["text"] for one in parts) == choice["text"]
            ends = [one["finish_reason"] for one in parts]
            assert [end for end in ends if end] == [ends[-1]] == [choice["finish_reason"]]


def test_a_chat_uses_the_template_and_ends_with_the_context(port, tuned):
    body = {"model": "tuned", "seed": 1, "temperature": 0}
    found = answer(port, CHAT, body | {"messages": HELLO})
    prompt = "<|endoftext|>### Instruction:\nCount 3\n\n### Response:\n"
    same = text(port, prompt=tuned.encode(prompt), seed=1, temperature=0, max_tokens=40)
    typed = text(port, prompt=prompt, seed=1, temperature=0, max_tokens=40)
    assert (typed["choices"], typed["usage"]) == (same["choices"], same["usage"])
    usage, message = found["usage"], found["choices"][0]["message"]
    assert usage["prompt_tokens"] == same["usage"]["prompt_tokens"]
    assert message["content"].startswith(same["choices"][0]["text"])
    assert usage["total_tokens"] == CONTEXT + 1  # the last token is drawn, not read
    parts = [{"type": "text", "text": "Count"}, {"type": "text", "text": " 3"}]
    again = answer(port, CHAT, body | {"messages": [{"role": "user", "content": parts}]})
    assert again["choices"] == found["choices"]


def test_a_stop_text_ends_an_answer_and_is_not_in_it(port):
    whole = text(port, max_tokens=20)["choices"][0]["text"]
    stop = whole[7:10]
    (found,) = text(port, max_tokens=20, stop=["never there", stop])["choices"]
    assert (found["text"], found["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    body = {"model": "tuned", "prompt": "Hello", "seed": 7, "max_tokens": 20, "stream": True}
    stream = events(ask(port, "POST", TEXT, body | {"stop": stop})[2])
    assert "".join(one["choices"][0]["text"] for one in stream) == found["text"]


def push(text: str, *stop: str) -> tuple[list[str], Choice]:
    choice = Choice(0, GPT2, stop, most=100)
    return [choice.push(id) for id in [*GPT2.encode(text), GPT2.end_of_text]], choice


def test_no_character_and_no_stop_text_is_sent_in_parts():
    parts, choice = push("naïve 🙂🙃 日本語 — ok")
    assert "".join(parts) == choice.text == "naïve 🙂🙃 日本語 — ok"
    assert len(list(filter(None, parts))) < len(parts)  # several tokens make a character
    assert "\ufffd" not in "".join(parts)
    parts, choice = push("one two three four", "three five", "thr")
    assert ("".join(parts), choice.finish) == ("one two ", "stop")
    parts, choice = push("one two three four", "three five")
    assert ("".join(parts), parts[2], choice.finish) == ("one two three four", " ", "stop")
    choice = Choice(0, GPT2, (), most=1)
    assert choice.push(GPT2.encode("🙂")[0]) == "\ufffd"  # and nothing more will come
    assert choice.finish == "length"


def test_the_model_is_listed(port):
    status, _, listed = ask(port, "GET", "/v1/models")
    (card,) = json.loads(listed)["data"]
    assert (status, card["id"], card["max_model_len"], card["can_chat"]) == (200, "tuned", 64, True)
    assert json.loads(ask(port, "GET", "/v1/models/tuned")[2]) == card
    assert ask(port, "GET", "/v1/models/other")[0] == 404
    assert json.loads(ask(port, "GET", "/health")[2]) == {"status": "ok", "requests": 0}


# Of completions, then of chat; most end with 400.
BAD_TEXTS: dict[str, Any] = {
    **{"not JSON": b"{", "deep": b"[" * 100_000, "a list": [], "no model": {"prompt": "a"}},
    "another model": {"model": "gpt-4o", "prompt": "a"},
    **{"no prompt": {}, "ids beyond": {"prompt": [50257]}, "prompts": {"prompt": ["a"] * 17}},
    "choices": {"prompt": ["a"] * 4, "n": 5},
    "long prompt": {"prompt": "a b" * 64},
    "very long prompt": {"prompt": "a" * 100_000},
    "long answer": {"prompt": "a", "max_tokens": 65},
    "large body": {"prompt": "a" * 2**20},
    "temperature": {"prompt": "a", "temperature": float("nan")},
    "top_p": {"prompt": "a", "top_p": 0},
    "seed": {"prompt": "a", "seed": 2**63},
    "stop": {"prompt": "a", "stop": [""]},
    "options": {"prompt": "a", "stream_options": {"include_usage": True}},
    "echo": {"prompt": "a", "echo": True},
    "logprobs": {"prompt": "a", "logprobs": 0},
    "unknown": {"prompt": "a", "top_q": 1},
}
BAD_CHATS: dict[str, Any] = {
    "tools": {"messages": HELLO, "tools": [{}]},
    "chat prompt": {"prompt": "a"},
    "two lengths": {"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 2},
    "no messages": {"messages": []},
    "last is ours": {"messages": [*HELLO, {"role": "assistant", "content": "4"}]},
    "role": {"messages": [{"role": "tool", "content": "a"}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
}


@pytest.mark.parametrize("name", [*BAD_TEXTS, *BAD_CHATS])
def test_a_bad_request_gets_openai_s_error_object(port, name, wording):
    path, body = (TEXT, BAD_TEXTS[name]) if name in BAD_TEXTS else (CHAT, BAD_CHATS[name])
    if isinstance(body, dict) and name != "no model":
        body = {"model": "tuned", **body}
    status, _, said = ask(port, "POST", path, body)
    assert status == {"another model": 404, "large body": 413}.get(name, 400)
    error = json.loads(said)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    wording(error["message"])


def test_what_changes_nothing_may_be_sent(port):
    """An empty system message is none, as in training."""
    body = {"model": "tuned", "max_tokens": 4}
    plain = answer(port, CHAT, body | {"messages": HELLO})["usage"]
    empty = [{"role": "system", "content": " "}, *HELLO]
    assert answer(port, CHAT, body | {"messages": empty})["usage"] == plain
    plain = text(port, max_tokens=4)["choices"]
    more = {"echo": False, "best_of": 1, "logprobs": None, "presence_penalty": 0.0, "user": "me"}
    assert text(port, max_tokens=4, logit_bias={}, suffix=None, **more)["choices"] == plain


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
LONE = st.just("\ud800")
ROLES = st.sampled_from(["system", "user", "assistant"])
MESSAGE = st.fixed_dictionaries({"role": ROLES, "content": st.text() | LONE})
MESSAGES = st.lists(MESSAGE, max_size=3)
FIELDS = {
    "model": st.just("tuned"),
    "prompt": st.text(max_size=30) | LONE | st.lists(st.integers(-1, 50257), max_size=4),
    "messages": MESSAGES,
    "max_tokens": st.integers(0, 6),
    "temperature": st.floats(0, 2) | st.just(1e-310),
    **{"top_p": st.floats(0, 1), "top_k": st.integers(0, 10**6)},
    **{"seed": st.integers(-(2**64), 2**64), "n": st.integers(0, 3)},
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5),
    "stream": st.booleans(),
    "\ud800": st.just(1),
}
OPTIONAL = {name: st.one_of(good, good, good, VALUES) for name, good in FIELDS.items()}
BODIES = st.fixed_dictionaries({}, optional=OPTIONAL)


@settings(max_examples=int(os.environ.get("FUZZ", "25")), deadline=None)
@given(path=st.sampled_from([TEXT, CHAT]), body=BODIES | VALUES | st.binary(max_size=40))
def test_no_body_makes_the_server_fail(port, path, body):
    if isinstance(body, dict) and "model" not in body:
        body = {"model": "tuned", **body}
    status, headers, said = ask(port, "POST", path, body)
    assert status in (200, 400, 404), said
    if headers["content-type"].startswith("text/event-stream"):
        assert all("error" not in event for event in events(said))
    else:
        assert ("error" in json.loads(said)) == (status != 200)


def test_a_model_that_was_not_tuned_completes_but_does_not_chat(runs):
    with served.in_thread(served.completer(runs, "base")) as port:
        assert answer(port, TEXT, {"model": "base", "prompt": ""})["usage"]["prompt_tokens"] == 1
        status, _, said = ask(port, "POST", CHAT, {"model": "base", "messages": HELLO})
    assert status == 400
    assert "base was not fine-tuned on conversations; use /v1/completions" in said


def test_other_sites_may_not_use_a_browser_of_this_machine(port):
    body = {"model": "tuned", "prompt": "a", "max_tokens": 1}
    own = f"127.0.0.1:{port}"
    for headers in (
        *({"Host": "evil.example"}, {"Host": f"evil.example:{port}"}, {"Host": "["}),
        *({"Origin": "http://evil.example"}, {"Origin": "null"}),
        {"Origin": f"http://127.0.0.1:{port + 1}"},
    ):
        for method, path in (("POST", TEXT), ("POST", CHAT), ("GET", "/v1/models")):
            status, found, said = ask(port, method, path, body, **headers)
            assert status == 403, said
            assert not [name for name in found if name.startswith("access-control")]
    for headers in ({"Origin": f"http://{own}"}, {"Host": "localhost"}, {"Host": "[::1]:8000"}):
        assert ask(port, "POST", TEXT, body, **headers)[0] == 200


def test_a_token_is_demanded_from_all_but_the_page(tuned):
    body = {"model": "tuned", "prompt": "a", "max_tokens": 1}
    with served.in_thread(tuned, token="s3cret") as port:
        for given in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
            for method, path in (("POST", TEXT), ("POST", CHAT), ("GET", "/v1/models")):
                status, headers, said = ask(port, method, path, body, **given)
                assert (status, headers["www-authenticate"]) == (401, "Bearer")
                assert json.loads(said)["error"]["code"] == "invalid_api_key"
                assert "s3cret" not in said
        away = {"Authorization": "Bearer s3cret", "Host": "my.server"}
        assert ask(port, "POST", TEXT, body, **away)[0] == 200
        assert json.loads(ask(port, "GET", "/health")[2]) == {"status": "ok"}
        assert json.loads(ask(port, "GET", "/health", **away)[2])["requests"] == 0
        status, headers, page = ask(port, "GET", "/")
        assert status == 200
    assert "tuned" not in page
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in page.replace("http-equiv", "")


HALF_A_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"


def connect(port: int, begun: bytes, address: str = "127.0.0.1") -> socket.socket:
    """Send the beginning of a request from an address of this machine."""
    opened = socket.create_connection(("127.0.0.1", port), source_address=(address, 0))
    opened.sendall(begun)
    return opened


def is_closed(connection: socket.socket, seconds: float | None = 0.1) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n", HALF_A_BODY])
def test_connections_that_never_finish_lock_nobody_out(tuned, begun, capfd):
    with served.in_thread(tuned) as port, contextlib.ExitStack() as stack:
        for _ in range(170):
            stack.enter_context(connect(port, begun))
        for _ in range(3):
            assert text(port, max_tokens=1)["usage"]["completion_tokens"] == 1
    assert capfd.readouterr().err == ""


def test_an_address_that_has_too_many_connections_loses_its_oldest(tuned, monkeypatch):
    monkeypatch.setattr(connections, "_OF_OTHERS", 3)
    with served.in_thread(tuned, max_waiting=1) as port, contextlib.ExitStack() as stack:
        quiet, crowd, third = (
            [stack.enter_context(connect(port, b"", f"127.0.0.{n}")) for _ in range(count)]
            for n, count in ((2, 2), (3, 6), (4, 1))
        )
        assert [is_closed(one) for one in crowd] == [True, True, True, False, False, False]
        assert not any(map(is_closed, quiet + third))


@pytest.mark.parametrize("begun", [b"GET /heal", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /"])
def test_headers_have_a_deadline_also_after_an_answer(tuned, begun, monkeypatch):
    monkeypatch.setattr(connections, "_HEADER_SECONDS", 0.2)
    with served.in_thread(tuned) as port, connect(port, begun) as opened:
        while not is_closed(opened, None):
            pass


@pytest.mark.parametrize(
    ("flags", "token"),
    [
        *(("--host=0.0.0.0", None), ("--host=my.server", None), ("", ""), ("", "clé")),
        *(("--port=65536", None), ("--max_waiting=-1", None), ("--host=256.1.1.1", "t")),
        ("--port=TAKEN", None),
    ],
)
def test_what_cannot_be_served_is_said_before_torch_is_loaded(flags, token, monkeypatch, wording):
    monkeypatch.delenv("GPT2LAB_API_KEY", raising=False)
    if token is not None:
        monkeypatch.setenv("GPT2LAB_API_KEY", token)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        with pytest.raises(ConfigError) as error:
            main(["serve", "no_run", *(flag.replace("TAKEN", number) for flag in flags.split())])
    wording(re.sub(r"--port \d{5}", "--port FREE", str(error.value).replace(number, "TAKEN")))


def test_a_missing_package_and_a_temperature_that_no_softmax_survives_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"no package uvicorn: pip install .*extra serve"):
        main(["serve", "no_run"])
    check_sampling(SamplingParams(temperature=1e-5))
    with pytest.raises(ConfigError, match="must be 0, or at least 1e-5"):
        check_sampling(SamplingParams(temperature=1e-40))


class Held:
    """Lets the model draw only when told, and counts its tokens."""

    def __init__(self, model: Completer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.drawn, self.ended = threading.Semaphore(0), 0, 0
        draw = model.draw

        def slow(*words: Any) -> Iterator[list[int]]:
            try:
                for row in draw(*words):
                    self.go.acquire()
                    self.drawn += 1
                    yield row
            finally:
                self.ended += 1

        monkeypatch.setattr(model, "draw", slow)


def begin(port: int, **more: Any) -> http.client.HTTPConnection:
    """Send a request for 40 tokens and return without its answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=launch.HANG_SECONDS)
    body = {"model": "tuned", "prompt": "Hello", "max_tokens": 40, "seed": 1, **more}
    connection.request("POST", TEXT, json.dumps(body))
    return connection


def requests(port: int) -> int:
    return int(json.loads(ask(port, "GET", "/health")[2])["requests"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_text_and_its_place_in_the_queue(stream, tuned, monkeypatch):
    held = Held(tuned, monkeypatch)
    with served.in_thread(tuned) as port:
        first = begin(port, stream=stream)
        served.wait_until(lambda: requests(port) == 1)
        second = begin(port, stream=stream)
        served.wait_until(lambda: requests(port) == 2)  # and the server answers meanwhile
        second.close()
        served.wait_until(lambda: requests(port) == 1)
        held.go.release(3)
        served.wait_until(lambda: held.drawn == 3)
        first.close()
        served.wait_until(lambda: requests(port) == 0)
        held.go.release(100)
        served.wait_until(lambda: held.ended == 1)
        assert held.drawn <= 5  # of 40
        assert text(port, max_tokens=2)["usage"]["completion_tokens"] == 2


def test_more_than_may_wait_are_rejected(tuned, monkeypatch):
    held = Held(tuned, monkeypatch)
    with served.in_thread(tuned, max_waiting=2) as port:
        begun = []
        for number in range(3):
            begun.append(begin(port))
            served.wait_until(lambda number=number: requests(port) == number + 1)
        status, _, said = ask(port, "POST", TEXT, {"model": "tuned", "prompt": "a"})
        assert (status, json.loads(said)["error"]["code"]) == (503, "overloaded")
        held.go.release(1000)
        texts = [json.loads(one.getresponse().read())["choices"] for one in begun]
        for one in begun:
            one.close()
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_model_is_an_error_object(stream, tuned, monkeypatch, capsys):
    def fail(*words: Any) -> Iterator[list[int]]:
        yield GPT2.encode("a")
        raise RuntimeError("the card is gone")

    monkeypatch.setattr(tuned, "draw", fail)
    with served.in_thread(tuned) as port:
        body = {"model": "tuned", "prompt": "Hello", "max_tokens": 4, "stream": stream}
        status, _, said = ask(port, "POST", TEXT, body)
        assert requests(port) == 0
    error = events(said)[-1]["error"] if stream else json.loads(said)["error"]
    assert (status, error["type"]) == (200 if stream else 500, "server_error")
    assert "card" not in said
    assert "the card is gone" in capsys.readouterr().err
