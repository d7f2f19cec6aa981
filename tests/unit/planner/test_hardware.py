"""The table of GPUs: names, sources, a user's own file over it."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from forecasting import KNOWN
from gpt2lab.errors import ConfigError
from gpt2lab.planner import hardware
from launch import REPOSITORY


def test_a_user_without_a_home_is_one_without_additions(monkeypatch):
    """As in a container that is started with a number for a user."""
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("no home directory")))
    assert not hardware.user_file().exists()
    assert hardware.load.__wrapped__().gpus == hardware.load(hardware.SHIPPED).gpus


CARDS = {
    **{"H100": "NVIDIA H100 80GB HBM3", "H100-PCIe": "NVIDIA H100 PCIe"},
    **{"A100-40GB": "NVIDIA A100-SXM4-40GB", "A100": "NVIDIA A100-SXM4-80GB"},
    **{"A100-PCIe": "NVIDIA A100 80GB PCIe", "A100-PCIe-40GB": "NVIDIA A100-PCIE-40GB"},
    **{"RTX-4090": "NVIDIA GeForce RTX 4090", "RTX-5090": "NVIDIA GeForce RTX 5090"},
    **{"T4": "Tesla T4", "V100": "Tesla V100-SXM2-16GB", "V100-32GB": "Tesla V100-SXM2-32GB"},
    **{"V100-PCIe": "Tesla V100-PCIE-32GB", "A6000": "NVIDIA RTX A6000"},
    **{"H100-NVL": "NVIDIA H100 NVL", "RTX-6000-Ada": "NVIDIA RTX 6000 Ada Generation"},
    **{
        name: f"NVIDIA {name}"
        for name in ["H200", "L4", "A10", "A10G", "A40", "L40", "L40S", "B200"]
    },
}
NO_CARDS = (
    *("NVIDIA A16", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti"),
    *("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GB200"),
)


@pytest.mark.parametrize(
    ("device", "name"), [*((d, n) for n, d in CARDS.items()), *((d, None) for d in NO_CARDS)]
)
def test_a_device_name_means_its_card_or_none(device, name):
    found = KNOWN.recognise(device)
    assert (found.name if found else None) == name


def test_a_users_file_merges_over_the_shipped_one(tmp_path):
    own, card = tmp_path / "own.json", {"words": [["x9"]], "bf16_tflops": [100, "me"]}
    night = {"about": "", "context_length": 256, "memory_target": 0.5, "tokens_per_parameter": 5}
    mine = {
        "sources": {"me": {"title": "my bill", "date": "2026-11-01"}},
        "gpus": {
            "H100": {"usd_per_hour": [1.5, "me"]},
            "X9": {**card, "bandwidth_gbs": [900, "me"]},
        },
        "profiles": {"night": {**night, "eval_interval": 4}},
    }
    own.write_text(json.dumps(mine))
    merged = hardware.load(own)
    assert (merged.gpu("h100").usd_per_hour, merged.gpu("h100").price_date) == (1.5, "2026-11-01")
    assert (merged.gpu("h100").peak_flops, merged.gpu("x9").peak_flops) == (989e12, 100e12)
    assert hardware.find_profile("night", merged).context_length == 256
    own.write_text(json.dumps({"gpus": {"X9": {**card, "bf16_tflops": [100, "nobody"]}}}))
    hardware.load.cache_clear()
    with pytest.raises(ConfigError, match=r"own\.json"):
        hardware.load(own)


def test_every_number_has_a_source_and_every_source_an_address():
    """But for listings of nvidia-smi whose pages nobody noted: the file says so."""
    table = json.loads(hardware.SHIPPED.read_text())
    numbers = [pair for gpu in table["gpus"].values() for pair in gpu.values()]
    numbers += table["constants"].values()
    used = {pair[1] for pair in numbers if isinstance(pair, list) and not isinstance(pair[0], list)}
    used |= {link["source"] for link in table["links"].values()}
    assert len(numbers) > 100
    # Every card with a rate has a memory, else no forecast could say whether a batch fits.
    rated = [gpu for gpu in KNOWN.gpus.values() if gpu.peak_flops]
    assert len(rated) >= 25
    assert [gpu.name for gpu in rated if not (gpu.memory_bytes and gpu.bandwidth)] == []
    assert used == set(table["sources"])
    assert all(source["date"] for source in table["sources"].values())
    addresses = {name: source.get("url") for name, source in table["sources"].items()}
    collected = {name for name, address in addresses.items() if address is None}
    assert collected == {"smi-listings"}
    assert "No address" in table["sources"]["smi-listings"]["title"]
    more = [a for s in table["sources"].values() for a in s.get("also", "").split()]
    for address in [*filter(None, addresses.values()), *more]:
        assert address.startswith("https://") or (REPOSITORY / address).is_file(), address
