"""Peak rates of GPUs, for the MFU column only. An unknown device has none, and its MFU is n/a."""

from __future__ import annotations

# Dense bf16 TFLOP/s (no sparsity), from NVIDIA's data sheets as collected in torchtitan's tools/utils.py
# (https://github.com/pytorch/torchtitan). The first key found in the device's name decides,
# so longer names stand first.
_PEAK_BF16_TFLOPS = (
    ("H200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("B200", 2250.0),
    ("A100", 312.0),
)


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 peak in FLOP/s, or None where it is not known."""
    if any(
        word in device_name for word in ("MIG", "GB200")
    ):  # a slice, or another chip, of what matches below
        return None
    for key, tflops in _PEAK_BF16_TFLOPS:
        if key in device_name:
            return tflops * 1e12
    return None
