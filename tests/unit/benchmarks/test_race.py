"""The comparison of trainers: what is read from each, who runs when, and when a ratio is rejected."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import ceilings, contestants, race, running, token_stream, trainers
from benchmarks.contestants import Contestant, Step
from benchmarks.sizes import SIZES
from fake_trainer import SMALL, entry_of, fake_trainer, place_in
from gpt2lab.errors import CheckError, ConfigError
from launch import HANG_SECONDS, call, worked


def _nanogpt(folder: Path) -> Path:
    folder.mkdir()
    (folder / "train.py").write_text("estimate_mfu(batch_size * gradient_accumulation_steps, dt)")
    return folder


def _predecessor(folder: Path, literal: str) -> Path:
    (folder / "src").mkdir(parents=True)
    source = f"class CheckpointManager: pass\n{literal}\nimport model"
    (folder / "src" / "train_improved.py").write_text(source)
    return folder


def test_each_trainers_own_lines_are_read(tmp_path):
    """The lines are as the programs print them; an unfinished last line is not a step."""
    place = place_in(tmp_path)
    _predecessor(tmp_path / "a", "vocab_size=50304")
    size = dataclasses.replace(SMALL, accumulation=2)
    said = {
        "nanogpt": (
            _nanogpt(tmp_path / "n"),
            "step 0: train loss 5.5, val loss 5.5\niter 0: loss 5.4010, time 432.10ms, mfu -100.00%\n",
        ),
        "predecessor": (
            tmp_path / "a",
            "step     0 | epoch 0 | loss: 5.401000 | lr: 6.00e-05 | norm: 1.9 | dt: 432.10ms | tok/sec: 4.74\n",
        ),
        "litgpt": (
            tmp_path,
            "Epoch 1 | iter 1 step 0 | loss train: 5.600, val: n/a | iter time: 400.00 ms remaining time: 1\n"
            "Epoch 1 | iter 2 step 1 | loss train: 5.401, val: n/a | iter time: 32.10 ms (step) remaining time: 1\n",
        ),
        "hf": (None, "some warning\nloss 5.4010 ms 432.100\n"),
    }
    for name, (checkout, text) in said.items():
        trainer = contestants.peer(name, checkout, place_in(tmp_path / f"run_{name}"), size)
        trainer.place.output.write_text(text + text.strip().rpartition("\n")[2])
        assert trainer.read(trainer.place) == [Step(pytest.approx(0.4321), pytest.approx(5.401))]
    ours = contestants.ours(place, size, dtype="auto")
    assert ours.read(place) == []
    (tmp_path / "run").mkdir()
    step = {"loss": 5.401, "step_seconds": 0.4321, "data_wait_seconds": 0.01}
    events = [{"event": "eval", "val_loss": 9}, {"event": "step", **step}]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "run" / "metrics.jsonl").write_text(lines + '{"event": "st')
    assert ours.read(place) == [Step(0.4321, 5.401, data_seconds=0.01)]


def test_a_checkout_that_is_another_program_or_whose_line_has_moved_is_rejected_by_name(tmp_path):
    """The predecessor writes its vocabulary into its source, so its copy must be edited."""
    assert contestants.parse_peer("hf") == ("hf", None)
    mine = _nanogpt(tmp_path / "n")
    assert contestants.parse_peer(f"nanogpt={mine}") == ("nanogpt", mine)
    (mine / "train.py").write_text("print('something else')")
    with pytest.raises(ConfigError, match=r"train\.py is not nanogpt's, or has changed"):
        contestants.parse_peer(f"nanogpt={mine}")
    good = _predecessor(tmp_path / "good", "GPTConfig(vocab_size=50304,")
    trainer = contestants.peer("predecessor", good, place_in(tmp_path / "run"), SIZES["tiny256"])
    assert "GPTConfig(vocab_size=256," in Path(trainer.program[0]).read_text()
    assert "vocab_size=50304" in (good / "src" / "train_improved.py").read_text()
    moved = _predecessor(tmp_path / "moved", "GPTConfig(vocab_size=args.vocab,")
    with pytest.raises(ConfigError, match=r"train_improved\.py .* no 'vocab_size=50304' any more"):
        contestants.peer("predecessor", moved, place_in(tmp_path / "run2"), SIZES["tiny256"])


def test_all_formats_hold_the_same_tokens(tmp_path):
    tokens = token_stream.text_tokens(200_000, vocab_size=50304)
    assert (tokens.dtype, tokens.max() < 50257) == (np.uint16, True)
    assert len(set(tokens.tolist())) > 1000
    token_stream.write_formats(tokens, tmp_path / "data")
    assert (np.load(tmp_path / "data/shards/edufineweb_train_000001.npy") == tokens).all()
    assert (np.fromfile(tmp_path / "data" / "tokens.bin", dtype=np.uint16) == tokens).all()
    assert token_stream.text_tokens(1000, vocab_size=256).max() < 256


def test_a_contestant_is_stopped_when_enough_is_known_or_reported_with_its_last_words(tmp_path):
    found = running.run(fake_trainer(tmp_path), warmup=2, steps=3, limit_seconds=HANG_SECONDS)
    assert [step.seconds for step in found.timed] == [0.0125, 0.0135, 0.0145]
    assert found.steps[0].loss == 9.0
    assert found.peak_rss > 1e6
    assert found.start_seconds > 0
    with pytest.raises(CheckError, match="fake ended by itself: out of luck"):
        running.run(fake_trainer(tmp_path, "3"), warmup=2, steps=30, limit_seconds=HANG_SECONDS)
    with pytest.raises(CheckError, match="has not finished in"):
        running.run(fake_trainer(tmp_path), warmup=2, steps=10_000, limit_seconds=0.5)


TRAINING = """
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(500, 1000, bias=False)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.ones(64, 500)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_memory_and_operators_of_any_training_script(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    script = (str(tmp_path / "train.py"),)
    trainer = Contestant("any", script, place_in(tmp_path), contestants._our_steps, SMALL)
    profile = running.measure_inside(trainer, "memory+profile", limit_seconds=HANG_SECONDS)
    live = profile["peak_live_bytes"]
    weights = 4 * 500 * 1000
    # Weights, gradients and two moments; and as AdamW is not fused here, temporaries as large as two more.
    assert 4 * weights < live < 6.1 * weights
    seconds = trainers.split_operators(profile["operators"], profile["step_seconds"], None)
    assert sum(seconds.values()) == pytest.approx(profile["step_seconds"], rel=0.3)
    assert min(seconds["matmul"], seconds["optimizer"]) > 0
    assert seconds["attention"] == seconds["communication"] == 0


def test_a_forecast_stands_beside_what_was_measured(tmp_path):
    """On a GPU the peak that a step reports is of tensors, without context and fragmentation."""
    place = dataclasses.replace(place_in(tmp_path), device="cuda")
    ours = contestants.ours(place, SIZES["gpt2"], dtype="auto")
    assert contestants.forecast_of(ours) is None  # nothing has run
    (tmp_path / "run").mkdir()
    rate = {"value": 490e3, "low": 400e3, "high": 600e3, "source": "roofline-prior", "mfu": 0.4}
    memory = {"total": 50e9, "context": 1e9}
    estimate = {"throughput": rate, "memory": memory}
    (tmp_path / "run" / "estimate.json").write_text(json.dumps(estimate))
    step = {"event": "step", "step_seconds": 1.0, "loss": 9.0, "data_wait_seconds": 0.0}
    lines = [{"event": "eval"}, *(step | {"peak_memory_bytes": peak} for peak in (47e9, 48e9))]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    found = contestants.forecast_of(ours)
    assert (found["peak_bytes"], found["actual_peak_bytes"]) == (49e9, 48e9)
    assert contestants.describe_forecast(found) == (
        "predicted 490,000 (400,000 to 600,000, roofline-prior); peak memory 48 GB, predicted 49 GB"
    )


def test_ours_runs_first_and_last_and_a_ratio_within_the_noise_is_not_printed():
    assert race.order(["A", "B", "C"], 1) == list("ABCA")
    assert race.order(["A", "B", "C"], 2) == list("ABCACBA"), "the others turn around"
    assert race.order(["A"], 1) == list("AA")
    ours = entry_of("ours", [1.0, 1.0], [1.1, 1.1])
    assert race.ratio(ours, entry_of("slow", [2.1, 2.1]))[1] == "2.00"
    near = (None, "not resolved: rounds differ by 10%")
    assert race.ratio(ours, entry_of("near", [1.1, 1.1])) == near
    assert race.ratio(ours, entry_of("unsteady", [1.0, 1.0], [3.0, 3.0]))[0] is None


def test_the_table_holds_the_medians_of_the_timed_steps():
    entries = entry_of("ours", [0.1, 0.3, 0.2], [0.2, 0.2, 0.2]), entry_of("other", [0.4, 0.4, 0.5])
    ours = entries[0].runs
    ours[0] = dataclasses.replace(ours[0], gpu=running.Weather(1755.0, 698.2, 71.0))
    ceilings = {"matmul": {"bf16": 1e9, "fp32": 1e9}, "peak": {"bf16": 2e9, "fp32": None}}
    rows = race.summarize([*entries], **ceilings)
    assert rows[0]["gpu"] == [{"sm_mhz": 1755.0, "watts": 698.2, "celsius": 71.0}]
    assert rows[0]["losses"] == [5.0, 4.0, 3.0, 2.0]
    assert rows[0]["tokens_per_second"] == pytest.approx(64 / 0.2)
    assert rows[0]["tokens_per_second_p10"] == pytest.approx(64 / 0.25)
    assert rows[1]["ours_is_times"] == {"ours": pytest.approx(2)}
    assert rows[1]["share_of_matmul"] == pytest.approx(64 / 0.4 * SMALL.flops_per_token / 1e9)
    assert rows[1]["mfu"] == pytest.approx(rows[1]["share_of_matmul"] / 2)
    assert (rows[1]["loss_first"], rows[1]["loss_last"]) == (5.0, 2.0)
    assert rows[1]["first_step_seconds"] == [9.0]
    head, *_, faster, slower = race.describe(rows, "EPYC 9004").splitlines()
    assert "SM MHz, W, C" in head
    assert [line.split()[-1] for line in (faster, slower)] == ["71", "n/a"]
    assert re.match(r"EPYC 9004 +tokens/s +p10-p90 +ours is x +of matmul", head)
    assert re.search(rf" 2\.00 +{rows[1]['share_of_matmul']:.0%} ", slower)


OPERATORS = {
    "matmul": ("aten::mm", "aten::addmm", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"),
    "attention": (
        *("aten::bmm", "aten::baddbmm"),
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "graph_0_cpp_fused__softmax_clone_split_transpose_view_2",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16",
    ),
    "cross-entropy": (
        *("aten::nll_loss_backward", "triton_red_fused__log_softmax__to_copy_view_3"),
        *("triton_red_fused_eq_exp_prepare_softmax_online_12", "cross_entropy_kernel"),
        "graph_0_cpp_fused__log_softmax__to_copy_nll_loss_forward_5",
        "graph_0_cpp_fused__to_copy_add_amax_arange_clamp_eq_exp_gather_ge_7",
    ),
    "elementwise": (
        *("graph_0_cpp_fused__to_copy_gelu_view_3", "aten::native_layer_norm"),
        "triton_per_fused_add_native_layer_norm_5",
    ),
    "optimizer": ("Optimizer.step#AdamW.step", "aten::_fused_adamw_", "aten::linalg_vector_norm"),
    "communication": ("gloo:all_reduce", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDev<4096>)"),
}


def test_operators_are_sorted_by_what_they_do_and_what_none_explains_is_idle_or_a_wait_for_data():
    for group, names in OPERATORS.items():
        assert {name: trainers.group_of(name) for name in names} == dict.fromkeys(names, group)
    seconds = trainers.split_operators({"aten::mm": 0.6, "aten::add": 0.1}, 1.0, None)
    assert seconds["idle"] == pytest.approx(0.3)
    assert "data" not in seconds
    assert "matmul 600.0 ms (60%)" in trainers.describe_split("ours", seconds)
    seconds = trainers.split_operators({"aten::mm": 0.6}, 1.0, 0.1)
    assert (seconds["data"], seconds["idle"]) == (0.1, pytest.approx(0.3))


@pytest.mark.parametrize("amx", ["amx_tile", "amx_bf16"])
def test_a_processor_with_tiles_has_no_register_peak_and_no_share_of_it(amx, monkeypatch):
    """Vector registers reached 106 GFLOP/s in bf16 where one matrix product on tiles reached 2,800."""
    flags = frozenset({"avx512f", "avx512_bf16"})
    assert not ceilings.has_amx(flags)
    assert ceilings.has_amx(flags | {amx})
    monkeypatch.setattr(ceilings, "cpu_flags", lambda: flags | {amx})
    for name in ("_matmul", "_copy", "_fresh_memory", "_attention"):
        monkeypatch.setattr(ceilings, name, lambda *_: 2.8e12)
    found = ceilings.measure_ceilings("cpu", SMALL)
    assert (found.register_fp32, found.register_bf16) == (None, None)
    text = ceilings.describe(found)
    assert ("matmul bf16" in text, "registers" in text) == (True, False)
    (row,) = race.summarize(
        [entry_of("ours", [0.1, 0.1])],
        matmul={"fp32": found.matmul_fp32, "bf16": found.matmul_bf16},
        peak={"fp32": found.register_fp32, "bf16": found.register_bf16},
    )
    assert row["mfu"] is None


@pytest.mark.slow
def test_the_whole_comparison(tmp_path, monkeypatch):
    """Our trainer beside Hugging Face, with memory and profile, in four processes; ceilings have a test above."""
    monkeypatch.setattr(ceilings, "_SECONDS", 0.0)
    monkeypatch.setattr(ceilings, "_LEAST_ROUNDS", 1)
    monkeypatch.setattr(running, "end_contestants_on_sigterm", lambda: None)  # in this process
    monkeypatch.setitem(SIZES, "tiny256", dataclasses.replace(SIZES["tiny256"], n_layer=1))
    words = ["--model", "tiny256", "--peer", "hf", "--steps", 2]
    words += ["--warmup", 1, "--memory", "--profile", "--json", tmp_path / "c.json"]
    said = worked(call("benchmark", "cpu", *words)).stdout
    found = json.loads((tmp_path / "c.json").read_text())["tiny256"]
    assert [row["name"] for row in found["trainers"]] == ["ours", "hf"]
    forecast, none = (row["forecast"] for row in found["trainers"])
    assert none is None
    assert forecast["source"] == "cpu-matmul"
    assert forecast["actual_peak_bytes"] > 1e7
    assert "; predicted " in said
    for row in found["trainers"]:
        assert row["tokens_per_second"] > 0
        assert 4 < row["loss_first"] < 7
        assert row["peak_live_bytes"] > 1e7
        assert row["name"] in said
        seconds = found["profile"][row["name"]]["seconds"]
        assert seconds["matmul"] > seconds["communication"] == 0
    assert found["trainers"][0]["processes"] == 2
