"""This process's rank, world size and device, and the few collectives that decisions need.

All ranks agree on every decision: rank 0 decides for all, or every rank reports and all see the same answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import fcntl
import os
import resource
import socket
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from gpt2lab.config.schema import Dtype, ResidualDtype, SystemConfig
from gpt2lab.distributed.processor import has_bf16, unseen_gpus
from gpt2lab.errors import ConfigError, GPT2LabError, to_gpt2lab_error

T = TypeVar("T")


class Runtime:
    """Rank, world size and device of this process, and collectives among the ranks."""

    def __init__(self, *, timeout_minutes: float = 60.0, is_watched: bool = False) -> None:
        """Join the process group that torchrun describes in the environment, if there is one.

        `timeout_minutes`: how long a collective waits for a rank. `is_watched`: heartbeat.py ends a hang earlier and
        names it, in place of NCCL's watchdog.

        Raises: ConfigError if the environment names a rank but not all that it needs to find the others.
        """
        _check_launch()
        self.is_distributed = "RANK" in os.environ
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK") or "0")
        self.world_size = int(os.environ["WORLD_SIZE"]) if self.is_distributed else 1
        self.device = torch.device("cpu")
        self.timeout_seconds = 60 * timeout_minutes
        if self.is_distributed:
            # Decisions travel by gloo between CPUs, gradients by NCCL between GPUs.
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            _choose_interface()
            if is_watched:
                _keep_survivors_alive()
            timeout = datetime.timedelta(minutes=timeout_minutes)
            # torchrun's restarts share one store: without its own prefix a start finds its dead predecessor's
            # addresses there, and never connects.
            store, rank, world_size = next(iter(rendezvous("env://")))
            count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = PrefixStore(count, store)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=timeout
            )
            self._decisions = dist.new_group(backend="gloo", timeout=timeout)

    def use(self, system: SystemConfig) -> None:
        """Choose this process's device.

        Raises: ConfigError if the machine does not have it.
        """
        # An RMSNorm's gain stays fp32 where the residual stream is bf16: no fused kernel, but no rounded gain either.
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        # fp32 is fp32: NVIDIA's containers set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, and torch would advise the same. A run
        # that was compiled in this process may have left another precision, one on the CPU the deterministic kernels.
        torch.set_float32_matmul_precision("highest")
        torch.set_deterministic_debug_mode("default")
        if system.device != "cpu" and not torch.cuda.is_available() and (why := unseen_gpus()):
            raise ConfigError(why)
        if system.device == "cpu" or (system.device == "auto" and not torch.cuda.is_available()):
            _keep_freed_memory()
            _use_deterministic_kernels()  # free on a CPU; without it compiled code adds atomically
            return
        if not torch.cuda.is_available():
            raise ConfigError(
                "device cuda: torch sees no GPU; check the driver and nvidia-smi, or use --device cpu"
            )
        if self.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {self.local_rank} has no GPU: this machine has {torch.cuda.device_count()}; "
                f"start fewer ranks"
            )
        self.device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(self.device)
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        if system.deterministic:
            _use_deterministic_cublas()
            _use_deterministic_kernels()

    @property
    def runs_ahead(self) -> bool:
        """Tell whether this process continues while its device computes what was launched."""
        return self.device.type == "cuda"

    def on_rank_zero(self, act: Callable[[], T]) -> T:
        """Run `act` on rank 0; return its result, or raise its error, on all ranks."""
        answer: list[Any] = [_attempt(act) if self.rank == 0 else None]
        if self.is_distributed:
            dist.broadcast_object_list(answer, src=0, group=self._decisions)
        result, error = answer[0]
        if error is not None:
            raise error
        return result

    def on_all_ranks(self, act: Callable[[], T]) -> T:
        """Run `act` on every rank; if it fails on one, all raise that error instead of waiting forever for the rank."""
        result, error = _attempt(act)
        for first in self.gather(error):
            if first is not None:
                raise first
        return result  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of ranks, on all ranks."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._decisions)
        return values

    def max_over_ranks(self, values: list[int]) -> list[int]:
        """Return the element-wise maximum of all ranks' values. Takes about 0.2 ms between CPUs."""
        if not self.is_distributed:
            return values
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._decisions)
        return [int(value) for value in tensor]

    def sum_over_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of `value` over all ranks."""
        if self.is_distributed:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Copy rank 0's values into every rank's tensors, in place."""
        for tensor in tensors if self.is_distributed else []:
            dist.broadcast(tensor, src=0)

    def synchronize(self) -> None:
        """Wait until the GPU's queue is empty, so that clocks measure its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory(self) -> int:
        """Return the peak memory so far in bytes: allocated on a GPU, resident on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        status = Path("/proc/self/status")
        if status.exists():  # on Linux getrusage also counts what the parent held when it forked
            return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def close(self) -> None:
        """Leave the process group together.

        Without the barrier the other ranks can hang in destroy while rank 0 still writes; without destroy gloo
        sometimes aborts at exit, and a finished run reports failure.
        """
        if self.is_distributed and dist.is_initialized():
            dist.barrier(group=self._decisions)
            dist.destroy_process_group()


def _check_launch() -> None:
    """Check the variables by which torchrun tells a process its rank; people also set them by hand."""
    if "RANK" not in os.environ:
        return
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")
    told = {name: os.environ.get(name, "0" if name == "LOCAL_RANK" else "") for name in needed}
    *numbers, address = told.values()
    are_good = all(text.isdecimal() and int(text[:9]) < 1 << 16 for text in numbers)
    if not are_good or not address or int(numbers[0]) >= int(numbers[1]):
        said = ", ".join(f"{name}={value}" for name, value in told.items())
        error = ConfigError(
            f"the environment names a rank, but not how to find the others: {said}; start with torchrun or --gpus N, "
            f"which set all of them, or unset RANK to train in one process"
        )
        error.is_local = True  # rank 0 may have been started rightly, or not at all
        raise error


def _keep_survivors_alive() -> None:
    """Have torch not abort a process whose peer has died: it saves the last complete step first (heartbeat.py).

    Its watchdog does so 100 ms after an error of NCCL, and its monitor some minutes later. torchrun sets 1; 3, torch's
    own default, is a user's choice.
    """
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1") == "1":
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


def _choose_interface() -> None:
    """Name the network interface towards the master node to gloo, unless the user did.

    Gloo binds to what the host name resolves to, which on Debian and in host-network pods is 127.0.1.1: no other node
    can connect to that.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        return  # one machine
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                SIOCGIFADDR = 0x8915  # netdevice(7)
                if fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24] == own:
                    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _attempt(act: Callable[[], T]) -> tuple[T | None, GPT2LabError | None]:
    """Return the result of `act` or the error that it raised; errors that are bugs still propagate."""
    try:
        return act(), None
    except (GPT2LabError, OSError) as error:
        known = to_gpt2lab_error(error)
        if known is None:
            raise
        known.is_local = False  # all ranks raise it, and rank 0 prints it for them
        return None, known


def fastest_dtype(device: torch.device) -> Dtype:
    """Return what matmuls run in at their fastest: bf16 from sm80 or on a CPU with it, fp16 from sm70, else fp32."""
    if device.type != "cuda":
        return "bf16" if has_bf16() else "fp32"
    capability = torch.cuda.get_device_capability(device)
    return "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"


def resolve_dtype(wanted: Dtype, device: torch.device) -> Dtype:
    """Turn `auto` into the fastest dtype.

    Raises: ConfigError if bf16 was asked for where it would only be emulated.
    """
    fastest = fastest_dtype(device)
    if wanted == "bf16" and fastest != "bf16":
        raise ConfigError(
            f"dtype bf16: this {device.type} has no native bf16; use --dtype {fastest}"
            f" (for a run begun in bf16 also --allow_change dtype)"
        )
    return fastest if wanted == "auto" else wanted


def resolve_residual_dtype(
    wanted: ResidualDtype, dtype: Dtype, device: torch.device
) -> ResidualDtype:
    """Turn `auto` into bf16 on a GPU that computes in bf16, else into fp32.

    Raises: ConfigError if bf16 was asked for beside products in fp32.
    """
    if wanted == "bf16" and dtype != "bf16":
        raise ConfigError(f"residual_dtype bf16 needs --dtype bf16; this run computes in {dtype}")
    if wanted == "auto":
        return "bf16" if dtype == "bf16" and device.type == "cuda" else "fp32"
    return wanted


def use_fast_fp32_matmul() -> bool:
    """Make a CPU multiply fp32 matrices with oneDNN instead of MKL where the result stays fp32; tell whether it does.

    MKL leaves half of an AMD core's vector units idle. But torch's switch also allows oneDNN to round to bf16, which it
    does on processors with bf16 tiles (AMX); there the switch is reset.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    torch.set_float32_matmul_precision("highest")
    exact = a @ b
    torch.set_float32_matmul_precision("medium")
    stays_fp32 = bool((a @ b - exact).abs().max() <= 1e-5 * exact.abs().max())  # bf16: 3e-3
    if not stays_fp32:
        torch.set_float32_matmul_precision("highest")
    return stays_fp32


def _use_deterministic_kernels() -> None:
    # As use_deterministic_algorithms(True), which also imports Inductor: seconds that an uncompiled run need not wait.
    torch.set_deterministic_debug_mode("error")
    # No code here reads uninitialized memory, and filling it costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _use_deterministic_cublas() -> None:
    """Give cuBLAS buffers of its own, without which its sums may differ; it reads the variable at its first use.

    Raises: ConfigError if the environment sets another value; torch would fail at the first product.
    """
    buffers = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if buffers not in (":4096:8", ":16:8"):
        raise ConfigError(
            f"CUBLAS_WORKSPACE_CONFIG={buffers} is not deterministic; unset it, or set :4096:8 or :16:8"
        )


def _keep_freed_memory() -> None:
    """Make glibc keep freed pages instead of returning them to the kernel after every step.

    Every training step frees and allocates the same large blocks, and a fresh 4 KiB page costs about a microsecond:
    without this, page faults take a large part of a CPU step. The cost is resident memory.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # musl has no mallopt: only slower
        return
    M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(M_TOP_PAD, 64 * 1024 * 1024)
