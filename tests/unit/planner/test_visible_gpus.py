"""The GPUs that nvidia-smi lists and those that CUDA_VISIBLE_DEVICES leaves to a process."""

import json
import sys

import pytest
import torch

from gpt2lab.commands import doctor
from gpt2lab.config.schema import SystemConfig
from gpt2lab.distributed import processor
from gpt2lab.distributed.runtime import Runtime
from gpt2lab.errors import ConfigError
from gpt2lab.planner import machine
from launch import write_program

BUILD = processor.build_of_torch

# Answers any --query-gpu with the columns that it asks for: a full card of another job, and two free ones.
FAKE = """#!{python}
import sys
cards = [
    {{"index": 0, "name": "NVIDIA A100-SXM4-80GB", "memory.free": 500, "uuid": "GPU-aaaa-0"}},
    {{"index": 1, "name": "NVIDIA H100 80GB HBM3", "memory.free": 80000, "uuid": "GPU-abbb-1"}},
    {{"index": 2, "name": "NVIDIA H100 80GB HBM3", "memory.free": 70000, "uuid": "GPU-cccc-2"}},
]
asked = [word for word in sys.argv if word.startswith("--query-gpu=")]
for card in cards if asked else []:
    card |= {{"memory.total": 81559, "utilization.gpu": 99 - 49 * card["index"]}}
    card |= {{"driver_version": "570.1", "compute_cap": "9.0"}}
    columns = asked[0].partition("=")[2].split(",")
    print(", ".join(str(card.get(column, "[N/A]")) for column in columns))
"""


@pytest.fixture(autouse=True)
def _three_cards(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    write_program(tmp_path / "nvidia-smi", FAKE.format(python=sys.executable))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(processor, "build_of_torch", lambda: ("2.13.0", "12.8"))


@pytest.mark.parametrize(
    ("chosen", "seen", "free_mib"),
    [
        *((None, [0, 1, 2], 500), ("1,2", [1, 2], 70_000), ("2", [2], 70_000)),
        *(("2,1", [2, 1], 70_000), (" 1 ", [1], 80_000), ("GPU-abbb-1", [1], 80_000)),
        *(("GPU-cccc", [2], 70_000), ("1,7,2", [1], 80_000)),
    ],
)
def test_a_process_counts_the_cards_that_it_may_use(monkeypatch, chosen, seen, free_mib):
    """In the order that CUDA numbers them; the full card of another job is not looked at."""
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    found = machine.detect_hardware()
    assert [gpu.index for gpu in found.gpus] == seen
    assert found.free_memory(len(seen)) == free_mib * 2**20
    assert found.busiest_gpu == (99 - 49 * min(seen)) / 100


def test_hidden_cards_leave_the_processor_and_of_a_mig_slice_nothing_is_known(monkeypatch, capsys):
    """Its memory is a part of the card's, and nvidia-smi's rows are cards."""
    for chosen in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert machine.detect_hardware().is_cpu
        assert doctor.main([]) == 0
        assert f"CUDA_VISIBLE_DEVICES={chosen} leaves visible" in capsys.readouterr().out
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234-5678")
    found = machine.detect_hardware()
    assert (len(found.gpus), found.is_cpu, found.auto_dtype) == (1, False, "bf16")
    assert found.free_memory(1) is None
    doctor.main(["--json"])
    (card,) = json.loads(capsys.readouterr().out)["gpus"]
    assert (card["memory_free"], card["memory_total"], card["peak_flops"]) == (None, None, None)
    doctor.main([])
    assert "n/a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cuda", "driver", "named"),
    [
        ("13.0", "550.54", ["580", "cu126", "--device cpu"]),
        (None, "550.54", ["580", "cu126", "--device cpu"]),
        (None, "590.1", ["cu130", "--device cpu"]),
        ("13.0", "580.65.06", None),
        ("12.6", "525.1", None),
    ],
)
def test_a_driver_too_old_for_torch_is_named_and_fixed(monkeypatch, tmp_path, cuda, driver, named):
    program = tmp_path / "nvidia-smi"
    program.write_text(program.read_text().replace("570.1", driver))
    monkeypatch.setattr(processor, "build_of_torch", lambda: ("2.13.0", cuda))
    found = processor.unseen_gpus()
    assert (found is None) == (named is None)
    assert all(word in str(found) for word in named or ())
    assert doctor.main([]) == (0 if named is None else 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch that sees no card")
def test_a_run_does_not_train_on_the_processor_beside_a_card_that_torch_cannot_see(monkeypatch):
    """With the torch of these tests, as on a machine with a wheel for processors."""
    monkeypatch.setattr(processor, "build_of_torch", BUILD)
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="--device cpu"):
            Runtime().use(SystemConfig(device=device))
    Runtime().use(SystemConfig(device="cpu"))


def test_a_field_that_the_driver_does_not_know_hides_no_card(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    unknown = 'if "clocks_event" in str(sys.argv): sys.exit("not a valid field")\ncards = ['
    program.write_text(program.read_text().replace("cards = [", unknown))
    found = machine.detect_hardware().gpus
    assert [(gpu.capability, gpu.throttle) for gpu in found] == [("9.0", None)] * 3
