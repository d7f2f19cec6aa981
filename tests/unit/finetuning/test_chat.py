"""Talking to a model: the template, what is remembered, where an answer ends, and the command with a pipe."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Encoder
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer

from conversations import CONTEXT, Echo, finetune, flags_of, write_model
from ecosystem import works_with
from gpt2lab.errors import ConfigError
from gpt2lab.evaluation.completion import Completer, SamplingParams
from gpt2lab.finetuning.chat import Chat
from gpt2lab.finetuning.evaluation import _words, rouge_scorer
from gpt2lab.finetuning.rows import EncodedConversation, Rows, build_rows, last_exchanges
from gpt2lab.interop.export import keeps_template
from gpt2lab.runs.target import find_target, was_tuned
from gpt2lab.tokenizers.chat_template import Turn, as_prompt, encode, jinja
from gpt2lab.tokenizers.gpt2 import GPT2
from gpt2lab.tokenizers.huggingface import of_json
from launch import Done, ask, call, rejected, worked

PAIRS = {"Hi": "Hello there", "Bye": "So long", "Name?": "A model", "More?": "No more"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with an untuned model `hf` and the run `tuned`, which knows four answers by heart."""
    folder = tmp_path_factory.mktemp("chat")
    write_model(folder / "hf")
    lines = [{"instruction": q, "output": a} for q, a in PAIRS.items()]
    lines.append({"instruction": "Held out", "output": "Hello there"})
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    more = ("--max_steps=90", "--max_lr=0.03", "--eval_freq=0", "--checkpoint_freq=0")
    usual = flags_of(folder, folder / "runs", "tuned", "--packing=off", "--val_fraction=0.2")
    finetune([*usual, *more])
    return folder


def talk(folder: Path, target: str, text: str, *flags: str) -> Done:
    return call("chat", target, "--checkpoint_dir=runs", *flags, folder=folder, stdin=text)


def test_what_was_said_is_the_context_until_it_no_longer_fits():
    """A long question leaves less room, and a longer one is rejected."""
    echo = Echo()
    chat = Chat(echo)  # type: ignore[arg-type]
    said: list[Turn] = []
    for number, question in enumerate(["One", "Two", "Three", "Four", "Five", "Six"]):
        answer = "".join(chat.ask(question))
        said.append(Turn("user", question))
        ids, at_most = echo.asked[-1]
        assert (ids, at_most) == (encode(said[-len(chat.turns) + 1 :], GPT2)[0], 12)
        assert len(ids) + at_most <= CONTEXT
        said.append(Turn("assistant", answer.strip()))
        assert (chat.turns, chat.number) == (said[-len(chat.turns) :], number + 1)
    assert 2 <= len(chat.turns) < 12, "nothing was forgotten, or all"
    chat.turns = []
    "".join(chat.ask("One"))
    assert echo.asked[-1] == echo.asked[0]
    chat.turns = []
    "".join(chat.ask("word " * 45))
    ids, at_most = echo.asked[-1]
    assert at_most == CONTEXT - len(ids) + 1 < 12
    turns = list(chat.turns)
    with pytest.raises(ConfigError, match=r"the question has \d+ tokens, .* holds 64; shorten it"):
        chat.ask("word " * 70)
    assert chat.turns == turns


def test_the_command_answers_a_pipe_and_obeys(folder):
    text = "Hi\n\n/what\nBye\n/reset\nName?\n/quit\nHi\n"
    done = worked(talk(folder, "tuned", text, "--temperature=0", "--max_new_tokens=8"))
    first, _, third = done.stdout.splitlines()
    assert (first, third) == (PAIRS["Hi"], PAIRS["Name?"])  # as learned: without anything before
    assert done.stderr.count("/reset clears the conversation, /quit ends") == 2
    assert "was not fine-tuned" not in done.stderr
    ended = talk(folder, "tuned", "Hi", "--temperature=0")  # the input ends within a line
    assert (ended.returncode, ended.stdout) == (0, "Hello there\n")


def test_a_model_that_was_not_tuned_is_named_and_a_long_question_is_no_end(folder):
    done = worked(talk(folder, "hf", f"{'word ' * 70}\nHi\n", "--max_new_tokens=2"))
    assert "warning: hf was not fine-tuned on conversations" in done.stderr
    assert "error: the question has" in done.stderr
    assert len(done.stdout) > 1


@pytest.mark.parametrize("flag", ["--temperature=-1", "--top_p=0", "--max_new_tokens=0"])
def test_wrong_settings_are_one_line(folder, flag, wording):
    wording(rejected(ask("chat", "tuned", flag, folder=folder)))


def test_an_export_keeps_the_template(folder):
    """Transformers' apply_chat_template gives the ids that the model was trained on, and our chat knows the export."""
    out = folder / "export"
    ask("export_hf.py", "tuned", f"--out={out}", "--json", folder=folder)
    assert was_tuned(find_target(str(out), folder))
    assert not was_tuned(find_target(str(folder / "hf"), folder))
    turns = [Turn("system", "Be kind."), Turn("user", "Hi  you"), Turn("assistant", "Yo.\n\nYo")]
    turns += [Turn("user", '"Quotes" & <b>'), Turn("assistant", "No")]
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    for count in (2, 3, 5):
        ids = tokenizer.apply_chat_template(messages[:count], return_dict=False)
        assert list(ids) == encode(turns[:count], GPT2)[0]


def test_a_template_that_would_give_other_ids_is_left_out_of_an_export(tmp_path):
    """As with tokenizers that begin each text with a space: training encodes prompt and answer apart."""
    pieces = [("</s>", 0.0), *((one, -1.0) for one in {"\u2581", *as_prompt("")})]
    whole = Encoder(models.Unigram(pieces, 0))
    whole.add_special_tokens(["</s>"])
    for is_spaced in (False, True):
        if is_spaced:
            whole.pre_tokenizer = pre_tokenizers.Metaspace()
        content = whole.to_str().encode()
        (tmp_path / "tokenizer.json").write_bytes(content)
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": jinja("</s>")}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(kind))
        assert keeps_template(tmp_path, of_json(content, "</s>", "whole")) is not is_spaced
        kept = json.loads((tmp_path / "tokenizer_config.json").read_text())
        assert ("chat_template" in kept) is not is_spaced


def test_the_last_exchange_of_a_row_is_found_again():
    first = [Turn("user", "Hi"), Turn("assistant", "Yo")]
    longer = [Turn("user", "A"), Turn("assistant", "B b"), Turn("user", "C")]
    spoken = [first, [*longer, Turn("assistant", "D d d")]]
    part = [EncodedConversation(*encode(t, GPT2), digest=str(n)) for n, t in enumerate(spoken)]
    for packing in ("on", "off"):
        rows: Rows = build_rows(part, CONTEXT, packing=packing, tokenizer=GPT2)  # type: ignore[arg-type]
        for turns, (prompt, answer) in zip(spoken, last_exchanges(rows), strict=True):
            assert prompt == encode(turns[:-1], GPT2)[0]
            assert [*prompt, *answer] == encode(turns, GPT2)[0][:-1]


def test_answers_are_compared_where_asked(folder, monkeypatch):
    plain = ask("evaluate.py", "tuned", "--json", folder=folder)
    assert plain["generate"] is None
    line = rejected(ask("evaluate.py", "hf", "--eval_generate", folder=folder))
    needs = "and that needs a run of gpt2lab finetune and no --val"
    assert line == f"error: hf: --eval_generate compares answers, {needs}"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "rouge_score", None)  # as if it were not installed
        line = rejected(ask("evaluate.py", "tuned", "--eval_generate", folder=folder))
    assert 'pip install "rouge-score>=0.1.2"' in line
    pytest.importorskip("rouge_score", reason="rouge-score is not installed")
    works_with("rouge-score", version("rouge-score"), "evaluate --eval_generate")
    scored = ask("evaluate.py", "tuned", "--eval_generate", "--json", folder=folder)
    assert (scored["val_loss"], scored["generate"]["n"]) == (plain["val_loss"], 1)
    assert 0 <= scored["generate"]["rouge_l"] <= 1
    # English is split as by the library's own tokenizer, and other scripts are not dropped.
    letters, split = "".join(map(chr, range(128))), sys.modules["rouge_score.tokenize"].tokenize
    assert _words(f"It's_A b\n{letters}") == split(f"It's_A b\n{letters}", None)
    cases = {"Всё - было": ("всё есть", 0.5), "क्या": ("क्यों", 0), "東京は": ("東京", 0.8)}
    for expected, (answer, share) in cases.items():
        assert rouge_scorer().score(expected, answer)["rougeL"].fmeasure == pytest.approx(share)


def test_a_completer_stops_where_it_is_told(folder):
    style = SamplingParams(max_new_tokens=20, temperature=0.0, top_k=0, seed=0)
    how = {"device": "cpu", "dtype": "fp32", "style": style}
    completer = Completer("tuned", checkpoint_dir=folder / "runs", **how)
    ids = encode([Turn("user", "Hi")], GPT2)[0]
    assert "".join(completer.stream(ids, number=0, place=0)) == "Hello there"
    assert "".join(completer.stream(ids, number=0, place=0, at_most=1)) == "Hello"
    assert (completer.before(ids), completer.before(ids[:-1])) == ([], ids[:-1]), "an answer begins"
