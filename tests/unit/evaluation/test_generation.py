"""scripts/sample.py: the cache changes no number, greedy text is transformers', a seed is a text."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.sample import compare_with_rerun, describe
from gpt2lab.config.schema import ModelConfig
from gpt2lab.errors import CheckpointError
from gpt2lab.evaluation import generation
from gpt2lab.evaluation.completion import Completer, SamplingParams
from gpt2lab.evaluation.generation import _pick, draw, draw_each, sample_text
from gpt2lab.evaluation.hellaswag import HellaSwag
from gpt2lab.evaluation.hellaswag_items import load_questions
from gpt2lab.model.gpt import GPT, build_model
from gpt2lab.tokenizers.gpt2 import END_OF_TEXT, GPT2, gpt2_encoding
from launch import ask, rejected
from one_process import Alone
from tiny import parse, pretrain, write_items

CONTEXT = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with a Hugging Face GPT-2 `hf` of large random weights."""
    folder = tmp_path_factory.mktemp("sample")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=4, n_embd=32, n_positions=CONTEXT))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder / "hf")
    return folder


def completer(folder: Path, **style: Any) -> Completer:
    params = SamplingParams(**{"max_new_tokens": 20, "seed": 1, **style})
    return Completer("hf", checkpoint_dir=folder, device="cpu", dtype="fp32", style=params)


def continued(model: GPT, prompt: list[int], *, seed: int = 0, **settings: Any) -> list[int]:
    how = {"generators": [torch.Generator().manual_seed(seed)], "end_of_text": END_OF_TEXT}
    return [id for (id,) in draw(model, prompt, **how, **settings)]


def test_a_new_token_needs_no_mask_and_no_plan_of_cudnn(folder, tmp_path, monkeypatch):
    """A text that grows has a new shape with each token, and cuDNN builds a plan for each."""
    model, calls, attention = completer(folder).model, [], F.scaled_dot_product_attention

    def record(q: torch.Tensor, *tensors: torch.Tensor, **how: Any) -> torch.Tensor:
        """Note new positions, masked, causal, and whether cuDNN's kernel is allowed."""
        masked = how["attn_mask"] is not None
        calls.append((q.size(2), masked, how["is_causal"], torch.backends.cuda.cudnn_sdp_enabled()))
        return attention(q, *tensors, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    how = {"generators": [torch.Generator()], "end_of_text": END_OF_TEXT}
    for _ in draw(model, [1, 2, 3], max_new_tokens=4, **how):
        assert torch.backends.cuda.cudnn_sdp_enabled(), "the caller's own attention is left alone"
    layers = model.config.n_layer
    assert calls == layers * [(3, False, True, False)] + 3 * layers * [(1, False, False, False)]
    calls.clear()
    questions = load_questions(write_items(tmp_path / "items.jsonl", 4), GPT2)
    HellaSwag(questions, context_length=CONTEXT, strategy=Alone("fp32")).measure(model)
    assert {call[1:] for call in calls} == {(True, False, False)}
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_greedy_text_is_what_transformers_generates(folder):
    theirs = GPT2LMHeadModel.from_pretrained(folder / "hf").eval()
    greedy = completer(folder, temperature=0.0, max_new_tokens=30)
    texts = set()
    for prompt in ("Hello, I'm a language model,", "To be", "naïve 你好", "x"):
        ids = torch.tensor([greedy.encode(prompt)])
        expected = theirs.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=50256)[0]
        new = expected[ids.size(1) :].tolist()
        (found,) = greedy.complete(ids[0].tolist())
        assert found.text == gpt2_encoding().decode([id for id in new if id != 50256])
        texts.add(found.text)
    assert len(texts) == 4, "the claim needs a model that listens to its prompt"
    assert len(greedy.encode(" the" * greedy.context_length)) == greedy.context_length, "all fits"


def test_a_text_that_outgrows_the_context_keeps_its_newer_half(folder):
    """From a full context on, the ids are those of a text that begins with its newer half."""
    model = completer(folder).model

    def greedy(prompt: list[int], count: int) -> list[int]:
        return continued(model, prompt, max_new_tokens=count, temperature=0)

    prompt = list(range(40, 70))
    text = prompt + greedy(prompt, 40)
    full = text[: CONTEXT + 1]  # the last of them is drawn from a full context
    assert text[CONTEXT + 1 :] == greedy(full[-(CONTEXT // 2) :], len(text) - CONTEXT - 1)
    fits = completer(folder, temperature=0.0, max_new_tokens=CONTEXT + 1 - len(prompt))
    list(fits.complete(prompt))
    assert (fits.outgrew, len(text) > CONTEXT + 1) == (False, True)
    list(fits.complete([*prompt, 7]))
    assert fits.outgrew


def test_a_sample_depends_on_its_seed_and_place_alone(folder, monkeypatch):
    prompt = completer(folder).encode("The ")
    three = list(completer(folder).complete(prompt, num_samples=3))
    two = completer(folder).complete(prompt, num_samples=2)
    assert [found.text for found in two] == [found.text for found in three[:2]]
    assert len({found.text for found in three}) == 3
    other = completer(folder, seed=2)
    assert next(other.complete(prompt)).text != three[0].text
    assert next(other.complete(prompt, number=1)).text != next(other.complete(prompt)).text
    for place, found in enumerate(three):
        assert "".join(completer(folder).stream(prompt, number=0, place=place)) == found.text
    # A billion texts come one batch after the other.
    many = completer(folder)
    found = list(itertools.islice(many.complete([1], num_samples=10**9), 20))
    assert many.tokens == 2 * 16 * many.style.max_new_tokens
    assert len({one.text for one in found}) == 20
    short, end = completer(folder), many.tokenizer.end_of_text
    monkeypatch.setattr(generation, "draw", lambda *_, **__: iter([[5, end], [6, end], [end, end]]))
    texts = list(short.complete([1], num_samples=2))
    assert (len(texts), short.tokens) == (2, 4), "none after a text's end"


def shares(**settings: Any) -> list[float]:
    """Return how often each of four ids of probability 0.5, 0.3, 0.15, 0.05 is drawn."""
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    generator = torch.Generator().manual_seed(0)
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | settings
    drawn = [_pick(logits, generator, **settings) for _ in range(4000)]
    return [drawn.count(id) / 4000 for id in (1, 3, 0, 2)]


def test_draws_have_the_probabilities_that_were_asked_for():
    assert shares() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(top_p=0.5) == [1, 0, 0, 0]
    assert shares(top_p=0.79) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert shares(top_p=0.85) == pytest.approx([10 / 19, 6 / 19, 3 / 19, 0], abs=0.03)
    assert shares(temperature=0.5) == pytest.approx([0.685, 0.247, 0.062, 0.007], abs=0.03)
    assert shares(temperature=0) == [1, 0, 0, 0]


def test_a_text_that_ended_does_not_end_the_others(folder, monkeypatch):
    model, calls = completer(folder).model, []

    def certain(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        scores = torch.full((2, 50304), -1e4)
        scores[0, 50256 if len(calls) == 2 else 17] = 1e4
        scores[1, 50256 if len(calls) == 4 else 18] = 1e4
        return scores

    monkeypatch.setattr(model, "head", certain)
    generators = [torch.Generator(), torch.Generator()]
    found = list(draw(model, [1], max_new_tokens=9, generators=generators, end_of_text=50256))
    assert found == [[17, 18], [50256, 18], [50256, 18], [50256, 50256]]


def test_the_benchmark_times_both_ways():
    how = {"model_name": "gpt2-nano", "device": "cpu", "dtype": "fp32"}
    found = compare_with_rerun(tokens=64, rounds=2, **how)
    assert len(found["ratios"]) == 2
    assert describe(found).startswith("gpt2-nano, 64 tokens: ")


def test_the_command_prints_prompt_and_text_and_the_speed(folder, monkeypatch):
    argv = ("hf", "--prompt=The ", "--max_new_tokens=5", "--device=cpu")
    expected = completer(folder, max_new_tokens=5, seed=1337)
    found = list(expected.complete(expected.encode("The "), num_samples=2))
    texts = [f"The {one.text}" for one in found]
    assert ask("sample.py", *argv, folder=folder) == f"{texts[0]}\n"
    both = "".join(f"{text}\n---\n" for text in texts)
    assert ask("sample.py", *argv, "--num_samples=2", folder=folder) == both
    assert expected.describe_speed().startswith("10 tokens in ")
    expected.style = SamplingParams(**{**vars(expected.style), "max_new_tokens": 60})
    next(expected.complete([1]))
    assert expected.describe_speed().endswith("beyond 48 tokens dropped their oldest half")


def test_interactive_continues_line_by_line_and_survives_a_long_one(folder):
    lines = f"The\n{'word ' * 99}\nA\n\nnever read\n"
    argv = ("hf", "--interactive", "--max_new_tokens=4", "--temperature=0", "--device=cpu")
    greedy = completer(folder, max_new_tokens=4, temperature=0.0)
    the, a = (next(greedy.complete(greedy.encode(prompt))).text for prompt in ("The", "A"))
    assert ask("sample.py", *argv, folder=folder, stdin=lines) == f"The{the}\nA{a}\n"


def test_a_file_of_prompts_becomes_a_file_of_texts(folder, tmp_path):
    in_one = "naïve\u2028你好\f"  # no end of a line to an editor
    (tmp_path / "in.txt").write_text(f"The\n\n{in_one}\n", encoding="utf-8-sig")
    out = tmp_path / "out.jsonl"
    argv = ("hf", f"--batch={tmp_path / 'in.txt'}", f"--out={out}", "--num_samples=2")
    assert ask("sample.py", *argv, "--max_new_tokens=4", "--device=cpu", folder=folder) == ""
    with open(out, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    prompts = enumerate(["The", "", in_one], start=1)
    wanted = [(line, sample, prompt) for line, prompt in prompts for sample in (0, 1)]
    assert [(e["line"], e["sample"], e["prompt"]) for e in lines] == wanted
    one = completer(folder, max_new_tokens=4, seed=1337)
    one.seconds = 1e6
    for number, prompt in enumerate(["The", "", in_one]):
        found = one.complete(one.encode(prompt), number=number, num_samples=2)
        texts = [e["text"] for e in lines if e["line"] == number + 1]
        assert [text.text for text in found] == texts
    assert one.seconds > 1e6, "the seconds of all texts together"
    assert "exists already" in rejected(ask("sample.py", *argv, folder=folder))
    assert {path.name for path in tmp_path.iterdir()} == {"in.txt", "out.jsonl"}


@pytest.mark.parametrize(
    "words",
    [
        *("hf", "hf --prompt=x --interactive", "hf --batch=in.txt", "hf --prompt=x --out=o"),
        *("hf --prompt=x --temperature=-1", "hf --prompt=x --top_p=0", "no/such/run --prompt=x"),
        *("hf --prompt=x --num_samples=0", "hf --batch=long.txt --out=o", "hf --prompt=LONG"),
        *("hf --batch=missing.txt --out=o", "hf --batch=empty.txt --out=o"),
        "hf --batch=hf --out=o",
        *("hf --batch=ok.txt --out=no/folder/o", "hf --start=x --out_dir=o"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(words, folder, wording):
    (folder / "long.txt").write_text("fine\n" + "word " * 99 + "\n")
    (folder / "ok.txt").write_text("fine\n")
    (folder / "empty.txt").write_text("")
    before = sorted(folder.iterdir())
    argv = [word.replace("LONG", "word " * 49) for word in words.split()]
    code, line = ask("sample.py", *argv, "--device=cpu", "--max_new_tokens=2", folder=folder)
    assert code in (2, 75)
    wording(line)
    assert sorted(folder.iterdir()) == before


def test_a_vocabulary_that_is_not_gpt2s_is_rejected(folder, tmp_path, tiny_flags):
    pretrain(parse([*tiny_flags, "--max_steps=1"]))
    line = rejected(ask("sample.py", "tiny", "--prompt=x", folder=tmp_path))
    assert "below GPT-2's 50257" in line


@pytest.fixture(scope="module")
def padded_model() -> GPT:
    """Return a model with the 47 padding rows of the default vocabulary."""
    config = ModelConfig(n_layer=1, n_head=1, n_embd=8, context_length=6, vocab_size=50304)
    return build_model(config, seed=1, device=torch.device("cpu")).eval()


@pytest.mark.parametrize("temperature", [0, 1])
def test_nothing_is_drawn_from_scores_that_are_not_numbers(folder, temperature):
    """Greedily it would be id 0 again and again, which looks like text of a bad model."""
    model = completer(folder).model
    with torch.no_grad():
        model.ln_f.weight[0] = torch.nan
    with pytest.raises(CheckpointError, match="scores are not finite"):
        continued(model, [1], max_new_tokens=2, temperature=temperature)
    one = {"generators": [torch.Generator()], "top_k": 0, "top_p": 1.0}
    with pytest.raises(CheckpointError, match="scores are not finite"):
        next(draw_each(model, [[1]], max_new_tokens=2, temperature=temperature, **one))


def test_text_depends_on_the_seed_alone_and_leaves_the_model_in_its_mode(padded_model):
    texts = []
    for global_seed, seed, training in ((1, 7, True), (2, 7, False), (2, 8, True)):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        padded_model.train(training)
        how = {"max_new_tokens": 5, "seed": seed}
        texts.append(sample_text(padded_model, GPT2.encode("def " * 9), GPT2, **how))
        assert padded_model.training == training
        assert torch.equal(torch.get_rng_state(), before)
    padded_model.eval()
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("def ") for text in texts)


def test_padding_ids_are_never_drawn_however_high_their_logits(padded_model, monkeypatch):
    plain = padded_model.head

    def high_on_padding(hidden: torch.Tensor) -> torch.Tensor:
        logits = plain(hidden).clone()
        logits[..., 50257:] = 1e4
        return logits

    monkeypatch.setattr(padded_model, "head", high_on_padding)
    ids = continued(padded_model, [1, 2], max_new_tokens=40, top_k=50304)
    assert len(ids) == 40
    assert max(ids) < 50257


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompts_of_different_lengths_side_by_side_continue_as_alone(padded_model, temperature):
    prompts = [[5], [7, 8, 9], [3, 4]]
    style = {"max_new_tokens": 4, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    generators = [torch.Generator().manual_seed(number) for number in range(3)]
    together = draw_each(padded_model, prompts, generators=generators, **style)
    alone = [continued(padded_model, p, seed=n, **style) for n, p in enumerate(prompts)]
    assert [list(ids) for ids in zip(*together, strict=True)] == alone
