"""What a figure was measured on: devices, clocks, versions, and how fast the machine multiplies matrices."""

import ctypes
import hashlib
import itertools
import os
import platform
import subprocess
from typing import Dict, Optional

import torch

from pycls.core.clock import clock_for
from pycls.core.config import cfg
from pycls.core.logging import git_commit

# Dense peaks of the vendor, TFLOP/s per GPU without sparsity: name in torch's device name -> by arithmetic.
_VENDOR_PEAKS = {
    "V100": {"fp32": 15.7, "fp16": 125.0},
    "A100": {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0},
    "H100": {"fp32": 67.0, "tf32": 494.5, "fp16": 989.0, "bf16": 989.0},
    "H200": {"fp32": 67.0, "tf32": 494.5, "fp16": 989.0, "bf16": 989.0},
    "B200": {"fp32": 80.0, "tf32": 1125.0, "fp16": 2250.0, "bf16": 2250.0},
}
_CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,power.limit"


def arithmetic(mode: str) -> str:
    """The arithmetic in which a precision mode multiplies matrices: fp32, tf32, fp16 or bf16."""
    return mode.removeprefix("amp_")


def vendor_peak(device_name: str, mode: str) -> Optional[float]:
    """The vendor's dense peak in TFLOP/s for a device and precision mode, None where it is not known."""
    for name, peaks in _VENDOR_PEAKS.items():
        if name in device_name:
            return peaks.get(arithmetic(mode))
    return None


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of large square matrix products in `dtype`: the ceiling that this machine was seen to reach."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    clock, marks = clock_for(device), []
    for _ in range(8):
        marks.append(clock.mark())
        a @ b
    marks.append(clock.mark())
    clock.finish()
    best = min(clock.seconds(x, y) for x, y in list(itertools.pairwise(marks))[2:])
    return 2 * size**3 / best / 1e12


def device_name(device: torch.device) -> str:
    """What the device calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            names = [line.split(":", 1)[1].strip() for line in f if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.machine()} ({os.cpu_count()} cores)"


def keep_freed_memory() -> bool:
    """Makes the C library keep freed memory for the next step; returns whether it will.

    A step on the CPU allocates and frees the same large tensors as the last one. By default glibc maps each anew, and
    the system clears it page by page: 3 to 10% of a step. A user's own settings (MALLOC_..., GLIBC_TUNABLES) stay, and
    other C libraries do as they like.
    """
    own = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if own or platform.libc_ver()[0] != "glibc":
        return False
    trim_threshold, mmap_max = -1, -4  # Numbers of mallopt(3): never give back, nothing from mmap.
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, -1))


def facts(device: torch.device) -> Dict:
    """What makes a figure comparable with another one."""
    return {
        "device": device_name(device),
        "clocks_mhz_and_power_limit_w": _nvidia_smi(_CLOCKS) if device.type == "cuda" else None,
        "driver": _nvidia_smi("driver_version") if device.type == "cuda" else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "commit": git_commit(),
        "config_hash": hashlib.sha256(cfg.dump().encode()).hexdigest()[:12],
    }


def _nvidia_smi(query: str) -> Optional[str]:
    """nvidia-smi's answer for the first GPU, None where the tool is missing or refuses."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
