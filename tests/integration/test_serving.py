"""gpt2lab serve as users start it, asked by OpenAI's own client and by a browser."""

import http.client
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from importlib.metadata import version
from pathlib import Path

import openai
import pytest

import browser
import served
from ecosystem import works_with

pytestmark = pytest.mark.slow
TOKEN = "a-token-of-the-tests"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return served.train(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def address(runs) -> Iterator[str]:
    flags = ["tuned", f"--checkpoint_dir={runs}", "--device=cpu"]
    with served.program(*flags, GPT2LAB_API_KEY=TOKEN) as (_, address):
        yield address


@pytest.fixture
def client(address) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key=TOKEN, max_retries=0) as client:
        yield client


def test_openai_s_client_reads_every_kind_of_answer(client):
    works_with("openai", version("openai"), "completions, chats and streams of serve")
    assert [model.id for model in client.models.list()] == ["tuned"]
    assert client.models.retrieve("tuned").owned_by == "gpt2lab"
    asked = {"model": "tuned", "prompt": "Hello", "max_tokens": 12, "seed": 5}
    whole = client.completions.create(**asked)
    usage = {"include_usage": True}
    parts = list(client.completions.create(**asked, stream=True, stream_options=usage))
    assert "".join(one.choices[0].text for one in parts[:-1]) == whole.choices[0].text
    assert (parts[-1].usage, whole.usage.completion_tokens) == (whole.usage, 12)
    chat = {"model": "tuned", "messages": [{"role": "user", "content": "Count 3"}], "seed": 5}
    answer = client.chat.completions.create(**chat, max_completion_tokens=12)
    chunks = list(client.chat.completions.create(**chat, max_completion_tokens=12, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == answer.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason == "length"


def test_openai_s_client_raises_its_own_errors(client, address):
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tuned", prompt="a b " * 64)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4o", prompt="a")
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_sixteen_clients_at_once_get_what_each_gets_alone(client, address):
    def ask(seed: int) -> str:
        with openai.OpenAI(base_url=f"{address}/v1", api_key=TOKEN, max_retries=0) as own:
            asked = {"model": "tuned", "prompt": f"Count {seed}", "max_tokens": 30, "seed": seed}
            if seed % 2:
                return own.completions.create(**asked).choices[0].text
            return "".join(p.choices[0].text for p in own.completions.create(**asked, stream=True))

    alone = [ask(seed) for seed in range(16)]
    assert len(set(alone)) == 16
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(ask, range(16))) == alone


def test_ctrl_c_ends_it_in_the_middle_of_an_answer(runs):
    with ExitStack() as opened:
        with served.program("base", f"--checkpoint_dir={runs}", "--device=cpu") as (_, address):
            connection = http.client.HTTPConnection(address.removeprefix("http://"))
            opened.enter_context(closing(connection))
            body = {"model": "base", "prompt": ["a"] * 16, "max_tokens": 64, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body))
            answer = opened.enter_context(connection.getresponse())
            assert answer.readline().startswith(b"data: ")
        lines = answer.read().splitlines()
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines if b"{" in line]
    # a sampled text may hold the word error: only the key says that an event is one
    errors = [event["error"]["message"] for event in events if "error" in event]
    assert errors == ["the server is shutting down"]


LAST = "document.querySelector('article:last-child')?.textContent"


@browser.needs_browser
def test_a_browser_chats(address, client, tmp_path):
    works_with("Chromium", browser.version(), "a question typed into serve's page", compare="name")
    pictures = Path(os.environ.get("PICTURES", tmp_path))
    with browser.page(tmp_path / "profile") as page:
        page.open(f"{address}/", "dark")
        page.wait("document.activeElement.id === 'key'")  # the page asks for the token
        page.type(TOKEN)
        page.press("Tab")
        page.wait("document.title === 'tuned'")
        for field, value in (("seed", "5"), ("tokens", "12"), ("temperature", "1")):
            page.evaluate(f"document.getElementById('{field}').value = '{value}'")
        page.evaluate("document.getElementById('text').focus()")
        page.type("<b id=bad>Count 3</b>")
        page.press("Enter")
        page.wait("document.getElementById('send').textContent === 'Send'")
        messages = [{"role": "user", "content": "<b id=bad>Count 3</b>"}]
        asked = {"model": "tuned", "messages": messages, "seed": 5, "max_tokens": 12}
        wanted = client.chat.completions.create(**asked)
        assert page.evaluate(LAST) == wanted.choices[0].message.content
        assert page.evaluate("document.getElementById('bad')") is None
        page.picture(pictures / "dark.png")
        for number in range(4):  # longer than the context: the oldest exchanges go
            page.type(f"And then, after number {number}?")
            page.press("Enter")
            page.wait("document.getElementById('send').textContent === 'Send'")
        assert page.evaluate("document.querySelectorAll('article').length") == 10
        assert page.evaluate("document.querySelectorAll('.error').length") == 0
        [rejected, *overflows] = page.errors
        assert "401" in rejected  # before the token was typed
        assert all("status of 400" in one for one in overflows)
        places = {address, f"{address}/v1", f"{address}/v1/chat", "data:,".rpartition("/")[0]}
        assert {request.rpartition("/")[0] for request in page.requests} <= places


@browser.needs_browser
def test_a_browser_continues_a_text_of_a_base_model(runs, tmp_path):
    pictures = Path(os.environ.get("PICTURES", tmp_path))
    model = served.completer(runs, "base")
    with served.in_thread(model) as port, browser.page(tmp_path / "profile") as page:
        page.open(f"http://127.0.0.1:{port}/")
        page.wait("document.title === 'base'")
        page.evaluate("document.getElementById('seed').value = '1'")
        page.type("Once upon")
        page.press("Enter")
        page.wait("document.getElementById('send').textContent === 'Send'")
        page.wait(f"{LAST}?.length > 'Once upon'.length")
        assert page.evaluate(LAST).startswith("Once upon")
        page.picture(pictures / "light.png")
        assert page.errors == []
