"""Runs through EleutherAI's lm-eval as its users start it, against its own model `hf` and against plain arithmetic."""

import functools
import json
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import launch
from conversations import write_pairs
from corpora import run_prepare, write_jsonl
from ecosystem import works_with
from gpt2lab.commands.evaluate import Evaluate, as_text, evaluate
from gpt2lab.errors import ConfigError, DataError
from gpt2lab.finetuning.recipe import FINETUNING
from gpt2lab.interop import scoring
from gpt2lab.interop.export import export
from gpt2lab.report.page import render
from gpt2lab.runs.history import read_json
from gpt2lab.runs.target import find_target
from gpt2lab.runs.weights import load_weights
from gpt2lab.tokenizers.bpe import train_bpe
from launch import SCRIPTS, ask
from own_tasks import ITEMS, NAMES, write_tasks
from tiny import parse, pretrain

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (requirements-dev.txt)")
with warnings.catch_warnings():  # the library's own, while its modules load
    warnings.simplefilter("ignore")
    import datasets
    import lm_eval.evaluator
    import lm_eval.tasks
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM

    from gpt2lab.interop.lm_eval import GPT2LabLM, main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # lm-eval's and datasets' own
]
CONTEXT = 32


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory) -> Any:
    """Let nothing be downloaded, and keep what datasets writes out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        # Asks git, pip and the processor what there is, for seconds.
        patch.setattr(lm_eval.evaluator, "add_env_info", lambda _: None)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with tasks, the runs `plain`, `modern` (own tokenizer) and `tuned` (LoRA), and an export."""
    folder = tmp_path_factory.mktemp("lm_eval")
    write_tasks(folder / "tasks")
    texts = [f"{text.strip()} {endings[0]} There is a {word}." for text, endings, word in ITEMS] * 9
    write_jsonl(folder / "corpus" / "a.jsonl", texts)
    run_prepare(folder / "corpus", folder / "gpt2")
    run_prepare(folder / "corpus", folder / "bpe", tokenizer=train_bpe(texts, 300))
    write_pairs(folder / "pairs.jsonl")
    usual = [
        *("--n_layer=1", "--n_head=2", "--n_embd=32", f"--context_length={CONTEXT}"),
        *("--total_batch_size=256", "--mini_batch_size=8", f"--checkpoint_dir={folder / 'runs'}"),
        *("--device=cpu", "--dtype=fp32", "--compile=off", "--eval_freq=0", "--sample_freq=0"),
    ]
    learns = ["--max_steps=60", "--max_lr=0.02"]
    pretrain(parse([*usual, *learns, f"--data_dir={folder / 'gpt2'}", "--run_name=plain"]))
    modern = ["--model=modern-nano", f"--data_dir={folder / 'bpe'}", "--max_steps=30"]
    pretrain(parse([*usual, *modern, "--run_name=modern"]))
    lora = ["--lora_r=4", "--max_steps=6", "--max_lr=0.05", "--run_name=tuned"]
    begun = [f"--init_from={folder / 'runs' / 'plain'}", f"--instructions={folder / 'pairs.jsonl'}"]
    pretrain(parse([*usual[4:], *begun, *lora], "finetune"), recipe=FINETUNING)
    plain = find_target("plain", folder / "runs")
    export(plain, out=folder / "export", dtype="float32", push_to_hub=None)
    return folder


def ours(folder: Path, run: str) -> Any:
    """Return a run as lm-eval's command line opens it."""
    assert get_model("gpt2lab") is GPT2LabLM
    arguments = f"path={run},dtype=fp32,checkpoint_dir={folder / 'runs'}"
    return GPT2LabLM.create_from_arg_string(arguments, {"device": "cuda:0", "batch_size": 1})


def measure(folder: Path, model: Any, **more: Any) -> dict[str, Any]:
    manager = lm_eval.tasks.TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    settings = {"tasks": NAMES.split(","), "task_manager": manager, "bootstrap_iters": 0}
    return lm_eval.simple_evaluate(model=model, **settings | more)


def requests_of(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


@pytest.mark.parametrize("shots", [0, 2])
def test_every_item_is_as_through_the_export_and_lm_evals_own_model(folder, shots):
    """Twenty items of each kind of request; with two examples before each, most are cut to the context."""
    what = "answers equal to those of `hf` on the export; `lm_eval --model gpt2lab`"
    works_with("lm-eval", version("lm-eval"), what)
    theirs = HFLM(str(folder / "export"), dtype="float32", batch_size=4, device="cpu")
    expected = measure(folder, theirs, num_fewshot=shots)
    model = ours(folder, "plain")
    found = measure(folder, model, num_fewshot=shots)
    greedy, texts = set(), set()
    for task in NAMES.split(","):
        pairs = list(zip(expected["samples"][task], found["samples"][task], strict=True))
        assert len(pairs) == len(ITEMS)
        for a, b in pairs:
            assert a["arguments"] == b["arguments"]
            decided = [metric for metric in a["metrics"] if "acc" in metric or "exact" in metric]
            assert [a[metric] for metric in decided] == [b[metric] for metric in decided]
            for wanted, answer in zip(a["filtered_resps"], b["filtered_resps"], strict=True):
                if task == "own_answers":
                    assert answer == wanted
                    texts.add(answer)
                elif task == "own_texts":
                    assert answer == pytest.approx(wanted, rel=2e-6)
                else:
                    assert answer[0] == pytest.approx(wanted[0], rel=2e-6)
                    assert answer[1] is wanted[1]
                    greedy.add(answer[1])
        for metric, value in expected["results"][task].items():
            if isinstance(value, float):
                assert found["results"][task][metric] == pytest.approx(value, rel=2e-6)
    if shots:
        return
    assert len(texts) > 3  # the model writes different answers
    # With room for 26 of 32 tokens, six of the question are left.
    longer = {"tasks": ["own_answers"], "gen_kwargs": {"max_gen_toks": 26, "until": ["."]}}
    both = [measure(folder, lm, **longer)["samples"]["own_answers"] for lm in (theirs, model)]
    assert [one["resps"] for one in both[0]] == [one["resps"] for one in both[1]]
    # What the model itself wrote is what greedy decoding writes.
    written = [
        (one["arguments"][0][0], one["filtered_resps"][0])
        for one in found["samples"]["own_answers"]
        if one["filtered_resps"][0]
    ]
    asked = requests_of("loglikelihood", *written)
    flags = [[flag for _, flag in lm.loglikelihood(asked)] for lm in (theirs, model)]
    assert flags[0] == flags[1]
    assert any(flags[0])
    assert False in greedy


def plain_answers(folder: Path, run: str, context: str, ending: str) -> tuple[float, bool]:
    """Score one ending alone, with nothing but the model's logits of its full text."""
    target = find_target(run, folder / "runs")
    tokenizer, model = target.tokenizer(), load_weights(target).eval()
    start = tokenizer.encode(context.rstrip())
    ids = tokenizer.encode(context + ending)
    count = len(ids) - len(start)
    ids = (ids if start else [tokenizer.end_of_text, *ids])[-CONTEXT - 1 :]
    with torch.inference_mode():
        logits = model(torch.tensor([ids[:-1]]))[0, -count:, : tokenizer.size]
    wanted = torch.tensor(ids[-count:])
    nats = logits.log_softmax(-1)[torch.arange(count), wanted].double().sum()
    return float(nats), bool((logits.argmax(-1) == wanted).all())


@pytest.mark.parametrize("run", ["modern", "tuned"])
def test_other_runs_are_scored_as_their_logits_say(folder, run):
    """RoPE, RMSNorm and an own BPE; adapters of LoRA. The texts are longer than the context with the small BPE."""
    asked = [(text, f" {ending}") for text, endings, _ in ITEMS for ending in endings]
    asked += [("", "There is a kettle."), ("There is a ", "bus."), ("\n ", " A bus.")]
    found = ours(folder, run).loglikelihood(requests_of("loglikelihood", *asked))
    for pair, (nats, is_greedy) in zip(asked, found, strict=True):
        expected = plain_answers(folder, run, *pair)
        assert nats == pytest.approx(expected[0], rel=1e-5)
        assert is_greedy is expected[1]


def test_a_drawn_text_depends_on_the_seed_and_its_place_alone(folder):
    model = ours(folder, "modern")
    settings = {"do_sample": True, "temperature": 1.5, "top_k": 0, "until": ["."]}
    settings["max_gen_toks"] = 9
    asked = [(text, settings) for text, _, _ in ITEMS[:5]]
    torch.manual_seed(1)
    texts = model.generate_until(requests_of("generate_until", *asked))
    assert len(set(texts)) > 2
    assert not any("." in text for text in texts)
    model._batch_tokens = 1  # every text in a batch of its own
    assert model.generate_until(requests_of("generate_until", *asked)) == texts
    torch.manual_seed(2)
    assert model.generate_until(requests_of("generate_until", *asked)) != texts


def test_answers_are_taken_from_lm_evals_cache(folder, tmp_path, monkeypatch):
    model, cache = ours(folder, "plain"), str(tmp_path / "cache")
    first = measure(folder, model, use_cache=cache)
    monkeypatch.setattr(scoring, "predict_endings", lambda *_: pytest.fail("computed again"))
    assert measure(folder, model, use_cache=cache)["results"] == first["results"]


def test_the_chat_template_is_that_of_the_export(folder, tmp_path):
    model, target = ours(folder, "tuned"), find_target("tuned", folder / "runs")
    export(target, out=tmp_path / "tuned", dtype="float32", push_to_hub=None)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tuned")
    turns = [("system", "Be short."), ("user", "Hi "), ("assistant", "Bye"), ("user", "And?")]
    talk = [{"role": role, "content": text} for role, text in turns]
    expected = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert model.apply_chat_template(talk) == expected
    assert model.tok_encode(expected) == theirs.encode(expected)
    with pytest.raises(ConfigError, match=r"^plain: no chat template, because it was not fine"):
        measure(folder, ours(folder, "plain"), apply_chat_template=True)


def test_what_cannot_be_answered_is_said_in_one_line(folder):
    model = ours(folder, "plain")
    too_long = ("Once", " upon" * (CONTEXT + 1))
    with pytest.raises(DataError, match=r"has 33 tokens; the model scores 1 to 32, its context"):
        model.loglikelihood(requests_of("loglikelihood", too_long))
    with pytest.raises(ConfigError, match=r"texts of 256 tokens .* holds 32; lower max_gen_toks"):
        model.generate_until(requests_of("generate_until", ("Once", {"until": ["."]})))
    with pytest.raises(ConfigError, match=r"^generation_kwargs num_beams: gpt2lab supports until"):
        model.generate_until(requests_of("generate_until", ("Once", {"num_beams": 4})))
    for wrong in ("pretrained=plain", "path=plain,dtype=fp8", ""):
        with pytest.raises(ConfigError, match=r"gpt2lab takes path=RUN\[,dtype"):
            type(model).create_from_arg_string(wrong)


def test_evaluate_keeps_what_it_measured_in_the_run(folder, tmp_path):
    runs, tasks = folder / "runs", folder / "tasks"
    every = {"tasks": NAMES, "tasks_path": tasks}
    found = evaluate(Evaluate("plain", runs, **every, save=tmp_path))
    assert found["val_loss"] is None
    endings = found["tasks"]["own_endings"]
    assert (endings["n"], endings["num_fewshot"]) == (20, 0)
    expected = measure(folder, ours(folder, "plain"))["results"]
    for task, numbers in found["tasks"].items():
        for metric, number in numbers["metrics"].items():
            assert number["value"] == expected[task][f"{metric},none"]
    assert endings["metrics"]["acc"]["se"] > 0
    assert found["tasks"]["own_texts"]["metrics"]["bits_per_byte"]["se"] > 0
    # Fewer items stand beside all of them, not in their place.
    (tasks / "own.py").write_text("def nan(doc, results): return {'acc': float('nan')}")
    unusual = "include: own_endings.yaml\nprocess_results: !function own.nan\nmetric_list:"
    (tasks / "nan.yaml").write_text(f"task: own_nan\n{unusual} [metric: acc]\n")
    group = "group: own_all\ntask: [{group: own_part, task: [own_endings]}]"
    (tasks / "all.yaml").write_text(f"{group}\naggregate_metric_list: [metric: acc]\n")
    asked = {"tasks": "own_nan,own_all", "limit": 5, "tasks_path": tasks}
    few = evaluate(Evaluate("plain", runs, **asked))
    assert {*few["tasks"]} == {f"own_{name}-first5" for name in ("endings", "nan", "all")}
    assert few["tasks"]["own_nan-first5"]["metrics"] == {"acc": {"value": None, "se": None}}
    assert "own_nan-first5 acc n/a +- n/a on 5 items" in " ".join(as_text(few).split())
    kept = read_json(runs / "plain" / "evaluations" / "step_00000060.json")["tasks"]
    assert kept == found["tasks"] | few["tasks"]
    page = render(runs / "plain")
    assert page.count('<td class="mono">own_endings</td>') == 2  # acc and acc_norm
    assert f'<td class="number">{endings["metrics"]["acc"]["se"]:.4f}</td>' in page
    other = evaluate(Evaluate("tuned", runs, **every))
    for a in ("plain", str(tmp_path), "plain/step_00000060"):
        compared = ask("compare", a, "tuned", "--only=tasks", "--json", folder=folder)["metrics"]
        assert set(compared) == {
            *("own_endings acc", "own_endings acc_norm", "own_texts bits_per_byte"),
            "own_answers exact_match",
        }
        for name, row in compared.items():
            task, metric = name.split()
            for side, numbers in (("a", found), ("b", other)):
                value = numbers["tasks"][task]["metrics"][metric]["value"]
                assert row[side] == pytest.approx(value, rel=1e-9)
        assert compared["own_endings acc"]["n"] == 20


def test_two_processes_find_the_same_bits(folder):
    argv = ["plain", f"--tasks={NAMES}", f"--tasks_path={folder / 'tasks'}", "--json"]
    argv += [f"--checkpoint_dir={folder / 'runs'}", "--num_fewshot=1"]
    alone = ask("evaluate.py", *argv[:-2], "--num_fewshot=1", folder=folder)
    done = launch.worked(launch.train_in_forks(argv, world=2, program=SCRIPTS / "evaluate.py"))
    assert json.loads(done.stdout) == alone


def test_lm_evals_own_command_line_has_the_model(folder, monkeypatch, capsys):
    expected = measure(folder, ours(folder, "plain"), tasks=["own_endings"])
    accuracy = expected["results"]["own_endings"]["acc,none"]
    # Without reading all 14,000 files of the library's own tasks.
    own = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", own)
    words = ["--tasks=own_endings", f"--include_path={folder / 'tasks'}", "--model=gpt2lab"]
    for run, code in (("plain", 0), ("nobody", 2)):
        named = f"path={run},checkpoint_dir={folder / 'runs'}"
        monkeypatch.setattr(sys, "argv", ["lm_eval", *words, "--model_args", named])
        assert main() == code
        told = capsys.readouterr()
        if code:
            assert told.err.splitlines()[-1].startswith("error: nobody: no run of this name in ")
        else:
            assert f"|acc     |↑  |{accuracy:>5}|±" in told.out
