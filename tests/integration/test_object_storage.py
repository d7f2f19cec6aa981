"""Runs whose checkpoints go to a real S3 server, moto's, on this machine, and come back on another one."""

import json
import subprocess
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import launch
from ecosystem import works_with
from tiny import TINY

pytestmark = pytest.mark.slow

STEPS = 20


class Store:
    """A bucket of a server, and runs named `run` whose checkpoints go there."""

    def __init__(self, server: Any, data: Path, folder: Path) -> None:
        import boto3

        host, port = server.get_host_and_port()
        self.data, self.folder = data, folder
        self.env = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
        place = {"endpoint_url": f"http://{host}:{port}", "region_name": "us-east-1"}
        self.s3 = boto3.client("s3", **place, **keys)
        self.env |= {name.upper(): value for name, value in keys.items()}
        self.bucket = f"bucket-{uuid.uuid4().hex}"  # all servers of a process share moto's state
        self.s3.create_bucket(Bucket=self.bucket)

    def run(
        self,
        machine: str,
        *more: str,
        world: int = 1,
        train: Callable[..., subprocess.CompletedProcess[str]] = launch.train_in_forks,
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        """Start the run on a machine: in a folder of its own."""
        return train(
            [
                *(*TINY, f"--data_dir={self.data}", "--run_name=run", f"--max_steps={STEPS}"),
                *("--checkpoint_freq=5", "--eval_freq=10", "--sample_freq=0"),
                *(f"--checkpoint_dir={self.folder / machine}", "--resume=auto"),
                *(f"--checkpoint_mirror=s3://{self.bucket}/models", *more),
            ],
            world=world,
            **self.env,
            **env,
        )

    def stop_after(self, machine: str, *steps: int) -> None:
        """Start it once for each step; the end waits for the copy of its last one."""
        for step in steps:
            done = launch.worked(self.run(machine, f"--stop_after_steps={step}"))
            assert step in self.complete(), done.stdout

    def path(self, machine: str) -> Path:
        return self.folder / machine / "run"

    def list_keys(self) -> list[str]:
        found = self.s3.list_objects_v2(Bucket=self.bucket).get("Contents", [])
        return [entry["Key"] for entry in found]

    def complete(self) -> list[int]:
        """Return the steps that have a manifest there."""
        keys = [key for key in self.list_keys() if key.endswith("/manifest.json")]
        return sorted(int(key.split("step_")[1][:8]) for key in keys)

    def assert_equals(self, machine: str, reference: Path) -> None:
        """The last machine's log is that of the whole run: every loss, and the final weights, have the same bits."""
        path = self.path(machine)
        assert launch.losses(path) == launch.losses(reference)
        hashes = [launch.parameter_hash(run, STEPS) for run in (path, reference)]
        assert hashes[0] == hashes[1]


@pytest.fixture
def store(tiny_data, tmp_path) -> Iterator[Store]:
    pytest.importorskip("s3fs", reason="s3fs is not installed (requirements-dev.txt)")
    pytest.importorskip("moto.server", reason="moto is not installed (requirements-dev.txt)")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield Store(server, tiny_data, tmp_path)
    server.stop()


@pytest.fixture(scope="module")
def reference(tiny_run) -> Path:
    """Return a run of all steps that had no mirror and never ended early."""
    return tiny_run(max_steps=STEPS, checkpoint_freq=5, eval_freq=10, sample_freq=0).path


def test_killed_uploads_and_downloads_then_a_new_machine_has_the_same_bits(store, reference):
    works_with("s3fs", version("s3fs"), "checkpoints on an S3 server (moto), with kills")
    store.stop_after("a", 5)
    fault = "mirror.upload.optim.safetensors:kill9@10"
    killed = store.run("a", "--stop_after_steps=10", FAULT=fault)
    assert killed.returncode == -9
    assert store.complete() == [5], "the copy of step 10 has no manifest"
    for point in ("download.optim.safetensors", "before_rename"):
        killed = store.run("b", FAULT=f"mirror.{point}:kill9@5")
        assert killed.returncode == -9
        assert "fetching step 5" in killed.stdout
        assert not list(store.path("b").glob("step_*"))
    killed = store.run("b", "--stop_after_steps=15", FAULT="mirror.upload.manifest.json:kill9@15")
    assert killed.returncode == -9
    newest = store.complete()[-1]
    assert newest in (5, 10), "whether step 10 was skipped is a matter of time"
    done = launch.worked(store.run("c", train=launch.train))
    assert f"fetching step {newest}" in done.stdout
    status = json.loads((store.path("c") / "status.json").read_text())
    place = {"url": f"s3://{store.bucket}/models/run", "error": None}
    assert status["mirror"] == {**place, "step": STEPS, "newest": STEPS}
    assert not list(store.path("c").glob(".tmp-*"))
    store.assert_equals("c", reference)


def test_the_newer_of_mirror_and_folder_is_used(store, reference):
    store.stop_after("a", 5)
    store.stop_after("b", 10)
    store.stop_after("a", 15)  # has 5, the mirror 10
    assert [e["from_step"] for e in launch.events(store.path("a"), "resume")][-1] == 10
    assert store.run("a", "--stop_after_steps=18", "--checkpoint_mirror=None").returncode == 0
    launch.worked(store.run("a"))
    assert [e["from_step"] for e in launch.events(store.path("a"), "resume")][-1] == 18
    store.assert_equals("a", reference)


def test_two_ranks_resume_on_a_new_machine(store):
    assert store.run("a", "--stop_after_steps=10", world=2).returncode == 0
    done = launch.worked(store.run("b", world=2, train=launch.train))
    assert done.stdout.count("fetching step 10") == 1
    launch.worked(store.run("c", "--checkpoint_mirror=None", world=2))
    store.assert_equals("b", store.path("c"))


def test_a_lost_bucket_is_an_error_and_a_dead_server_stops_no_run_under_way(store, reference):
    store.stop_after("a", 5)
    for key in store.list_keys():
        store.s3.delete_object(Bucket=store.bucket, Key=key)
    store.s3.delete_bucket(Bucket=store.bucket)
    lost = store.run("x")
    assert lost.returncode == 2
    assert lost.stderr.splitlines()[-1].startswith("error: checkpoint_mirror s3://")
    assert f"there is no {store.bucket}" in lost.stderr
    assert not store.path("x").exists()
    store.env["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"  # nobody listens there
    code = store.folder / "code"
    store.env["GPT2LAB_EXIT_CODE_FILE"] = str(code)
    fresh = store.run("x")
    assert (fresh.returncode, code.read_text()) == (2, "1\n"), "run_until_done.sh starts again"
    assert "cannot be read" in fresh.stderr
    assert not store.path("x").exists()
    launch.worked(store.run("a"))
    warnings = [event["message"] for event in launch.events(store.path("a"), "warning")]
    assert sum("checkpoint not copied" in message for message in warnings) == 1, warnings
    status = json.loads((store.path("a") / "status.json").read_text())
    assert (status["state"], status["mirror"]["step"]) == ("completed", None)
    assert status["mirror"]["error"]
    store.assert_equals("a", reference)
