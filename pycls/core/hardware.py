"""What a figure was measured on: devices, clocks, versions, and how fast the machine multiplies matrices."""

import ctypes
import hashlib
import itertools
import os
import platform
import subprocess
from typing import Dict, NamedTuple, Optional

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


class Gpu(NamedTuple):
    """A device as the planner knows it.

    Attributes:
        name: as in torch's device name. peaks: dense TFLOP/s by arithmetic. memory: GiB. bandwidth: of memory, TB/s.
        nvlink: GB/s one way, inside a node. network: GB/s one way between nodes of 8, as such nodes usually had it.
        matrix: share of the peak that the best published matrix products reach. processors: streaming multiprocessors.
    """

    name: str
    peaks: Dict[str, float]
    memory: float
    bandwidth: float
    nvlink: float
    network: float
    matrix: float
    processors: int


# Data sheets; network: one 100 Gb/s card (V100), 400 Gb/s (A100 40 GB, as cloud machines had it), a 200 Gb/s card per
# GPU (A100 80 GB), a 400 Gb/s card per GPU since. Matrix products: S. Bekman, "Machine Learning Engineering".
GPUS = {
    "v100-16": Gpu("V100", _VENDOR_PEAKS["V100"], 16, 0.90, 150, 12.5, 0.76, 80),
    "v100-32": Gpu("V100", _VENDOR_PEAKS["V100"], 32, 0.90, 150, 12.5, 0.76, 80),
    "a100-40": Gpu("A100", _VENDOR_PEAKS["A100"], 40, 1.555, 300, 50, 0.87, 108),
    "a100-80": Gpu("A100", _VENDOR_PEAKS["A100"], 80, 2.039, 300, 200, 0.87, 108),
    "h100": Gpu("H100", _VENDOR_PEAKS["H100"], 80, 3.35, 450, 400, 0.80, 132),
    "h200": Gpu("H200", _VENDOR_PEAKS["H200"], 141, 4.8, 450, 400, 0.80, 132),
    "b200": Gpu("B200", _VENDOR_PEAKS["B200"], 180, 8.0, 900, 400, 0.78, 148),
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


def this_cpu() -> Gpu:
    """This machine's CPU in the planner's terms, measured in a few seconds; processes of one machine share it."""
    device = torch.device("cpu")
    peaks = {name: measure_peak(device, dtype) for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))}
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    bandwidth = _measure_bandwidth()
    return Gpu(device_name(device), peaks, memory, bandwidth, 1e3 * bandwidth / 4, 1.25, 1.0, 1)


def _measure_bandwidth() -> float:
    """TB/s of a copy in this machine's memory, reading and writing both counted."""
    source, target = torch.ones(2**25), torch.empty(2**25)
    clock, marks = clock_for(source.device), []
    for _ in range(6):
        marks.append(clock.mark())
        target.copy_(source)
    marks.append(clock.mark())
    clock.finish()
    best = min(clock.seconds(x, y) for x, y in list(itertools.pairwise(marks))[1:])
    return 2 * source.numel() * source.element_size() / best / 1e12


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
