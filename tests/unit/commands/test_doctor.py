"""gpt2lab doctor: what helps with an issue is in it, and what belongs to its writer is not."""

import importlib.metadata
import json
import platform
import shutil

import launch
from gpt2lab import __version__
from gpt2lab.commands.doctor import without_names
from tiny import edit_json
from whole_run import LAST


def test_it_prints_versions_and_hardware():
    code, said, error = launch.call("doctor")
    assert (code, error) == (0, "")
    for name in ("torch", "numpy", "safetensors"):
        assert f"  {name:<16} {importlib.metadata.version(name)}\n" in said
    assert f"  gpt2lab          {__version__}\n" in said
    assert f"python           CPython {platform.python_version()}\n" in said
    assert said.startswith("versions:\n")
    assert "\nmachine:\n" in said
    assert "run:" not in said
    found = json.loads(launch.call("doctor", "--json").stdout)
    assert set(found) == {"versions", "machine", "gpus", "topology"}
    assert found["machine"]["cores"] >= 1
    assert set(map(str, found["versions"])) >= {"gpt2lab", "git", "python", "torch", "triton"}


def test_a_run_s_facts_identify_it_and_hide_its_owner(straight, tmp_path, monkeypatch):
    home = tmp_path / "home" / "somebody"
    shutil.copytree(straight.path, home / "runs" / "tiny")
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "DB_PASSWORD"):
        monkeypatch.setenv(name, f"value-of-{name}")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.setattr(platform, "node", lambda: "tiny-host")
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-tiny-host-somebody")
    code, said, error = launch.call("doctor", home / "runs" / "tiny", "--json")
    assert (code, error) == (0, "")
    run = json.loads(said)["run"]
    assert (run["folder"], run["state"], run["step"]) == ("~/runs/tiny", "completed", LAST)
    facts = json.loads((straight.path / "run.json").read_text())
    assert run["data_fingerprint"] == facts["data_fingerprint"]
    assert run["run_torch"] == facts["environment"]["torch"]
    for private in ("somebody", "tiny-host", "value-of", str(tmp_path)):
        assert private not in said
    # The same settings in another place have the same hash, other settings another one.
    for change, same in (({"checkpoint_dir": "/else"}, True), ({"seed": 5}, False)):
        edit_json(home / "runs" / "tiny" / "config.json", **change)
        other = json.loads(launch.call("doctor", home / "runs" / "tiny", "--json").stdout)["run"]
        assert (other["settings_sha256"] == run["settings_sha256"]) == same


def test_a_host_is_hidden_with_its_domain(monkeypatch):
    said = "rank 0 on gpu7.cs.uni.edu: timeout; my-gpu7 too, not gpu70."
    for node in ("gpu7", "gpu7.cs.uni.edu"):
        monkeypatch.setattr(platform, "node", lambda node=node: node)
        assert without_names([said]) == ["rank 0 on ***: timeout; my-*** too, not gpu70."]
