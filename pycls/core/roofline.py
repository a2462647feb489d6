"""How long a training step takes on a cluster: a roofline for the kernels, latency and bandwidth for the messages.

Each kernel of the traced step (`pycls/core/trace.py`) takes the longer of its arithmetic at a share of the vendor's
peak and its memory traffic at a share of the memory's bandwidth; an optimizer step is traffic alone. Neither can be
faster than the host launches kernels. Messages take a latency and their bytes over the slower of the links that they
cross; a share of them hides behind the arithmetic that runs at the same time. All shares are in `ASSUMED`.
"""

import math
from typing import List, NamedTuple

from pycls.core import hardware, memory
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.hardware import Gpu
from pycls.core.memory import Choice


class Assumed(NamedTuple):
    """What is assumed of any machine; shares are of what the hardware could do.

    Attributes:
        matrix: of the best published matrix product, reached by a network's products. attention: the same of fused
            attention over short sequences. unaligned: of `matrix`, by 16-bit products with rows of odd length.
        bandwidth: of the memory's, by kernels that only move bytes. uneven: of `bandwidth`, on rows of odd length.
        eager: of this roofline, reached without COMPILE; anchored to Meta's ViT-H/16 on 8 A100 (103 images/s per GPU,
            25% of the peak). compiled: with it; well-kept libraries report 44 to 53% of an A100's peak for such shapes.
        fused: share of the elementwise traffic that is left in compiled blocks.
        launch: seconds per kernel. link: share of a link's bandwidth that collectives reach. hidden: share of a
            message that can run beside arithmetic. start, hop, far_hop: seconds per message and per GPU or node passed.
        pcie, host_bandwidth: bytes/s between GPU and host, and of the host's memory per process (FSDP.CPU_OFFLOAD).
        full: share of a GPU's memory that may be planned; the allocator loses some to fragments.
    """

    matrix: float = 0.75
    attention: float = 0.40
    unaligned: float = 0.25
    bandwidth: float = 0.75
    uneven: float = 0.5
    eager: float = 0.65
    compiled: float = 0.85
    fused: float = 0.5
    launch: float = 5e-6
    link: float = 0.8
    hidden: float = 0.5
    start: float = 10e-6
    hop: float = 1.5e-6
    far_hop: float = 5e-6
    pcie: float = 20e9
    host_bandwidth: float = 20e9
    full: float = 0.95


ASSUMED = Assumed()
# Bytes that an optimizer step moves per weight, fused and not, and kernels per tensor: counted from torch's kernels,
# each operand read or written once.
_OPTIMIZER = {"sgd": (20, 56, 5), "adam": (28, 88, 9), "adamw": (28, 84, 9)}


class Cluster(NamedTuple):
    """What to run on. network: GB/s one way between nodes. scale_*: corrections by a measurement (1: none)."""

    key: str
    gpu: Gpu
    per_node: int
    network: float
    scale_compute: float = 1.0
    scale_optimizer: float = 1.0

    @property
    def cuda(self) -> bool:
        return self.key != "cpu"

    def peak(self, mode: str) -> float:
        """Vendor's FLOP/s in a precision mode.

        Raises:
            UserError: the device has no such arithmetic.
        """
        peaks, kind = self.gpu.peaks, hardware.arithmetic(mode)
        # Without TF32 units, or on the CPU, tf32 is fp32; the CPU emulates fp16.
        kind = "fp32" if kind == "tf32" and kind not in peaks else kind
        if kind not in peaks:
            other = "amp_fp16" if "fp16" in peaks else "amp_bf16"
            raise UserError(f"PRECISION.MODE: {mode} is emulated on {self.key}, and slow; try {other}")
        return 1e12 * peaks[kind]


# -------------------------------------------------------------------- communication


class Message(NamedTuple):
    """One kind of collective of a step: bytes that each GPU sends in all, number of calls, seconds in all."""

    kind: str
    phase: str
    bytes: float
    calls: int
    seconds: float


def messages(choice: Choice, weights: memory.Weights, cluster: Cluster) -> List[Message]:
    """All collectives of a step, with the phase, forward or backward, that they run beside."""
    if choice.gpus == 1:
        return []
    if not choice.sharded:
        buckets = math.ceil(weights.bytes / (25 * 2**20))
        return [_message("all-reduce", "backward", weights.bytes, buckets, choice.gpus, cluster)]
    size, reduced = (2 if choice.half else 4), memory.reduced_size(choice)
    calls = 1 + len(weights.blocks)
    shards, parts = choice.shards, choice.parts
    sent = [_message("all-gather", "forward", parts * size * weights.count, parts * calls, shards, cluster)]
    if choice.reshard:
        sent.append(_message("all-gather", "backward", parts * size * weights.count, parts * calls, shards, cluster))
    sent.append(_message("reduce-scatter", "backward", reduced * weights.count, calls, shards, cluster))
    copies = choice.gpus // shards
    if copies > 1:
        part = reduced * weights.count / shards
        sent.append(_message("all-reduce", "backward", part, calls, copies, cluster, stride=shards))
    return sent


def _message(kind, phase, size, calls, group, cluster: Cluster, stride: int = 1) -> Message:
    """`calls` collectives of `size` bytes in all over `group` GPUs, `stride` apart, in rings as NCCL builds them.

    The members of a group that share a node pass on what comes from outside; groups that run side by side share the
    node's network.
    """
    inside = min(group, max(cluster.per_node // stride, 1))
    nodes = math.ceil(group / inside)
    factor = (2 if kind == "all-reduce" else 1) * (group - 1) / group
    link = 1e9 * ASSUMED.link * cluster.gpu.nvlink
    if nodes > 1:
        link = min(link, 1e9 * ASSUMED.link * cluster.network / min(stride, cluster.per_node))
    # A reduction over many nodes goes up and down a tree; gathering passes through all of them.
    far = 2 * math.log2(nodes) if kind == "all-reduce" else nodes - 1
    latency = ASSUMED.start + ASSUMED.hop * (inside - 1) + ASSUMED.far_hop * far
    return Message(kind, phase, factor * size, calls, calls * latency + factor * size / link)


def _exposed(sent: List[Message], phase: str, beside: float) -> float:
    """Seconds of a phase's messages that do not hide behind `beside` seconds of arithmetic; the first or last call
    never does."""
    mine = [m for m in sent if m.phase == phase]
    total = sum(m.seconds for m in mine)
    ends = sum(m.seconds / m.calls for m in mine[-1:])
    hidden = min(ASSUMED.hidden * total, beside, total - ends)
    return total - hidden


# ------------------------------------------------------------------------- step time


class Step(NamedTuple):
    """Seconds of a step: arithmetic, messages that show, optimizer with EMA."""

    compute: float
    exposed: float
    optimizer: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.optimizer


def step_time(choice: Choice, model: memory.Model, cluster: Cluster) -> Step:
    """Predicts the step of `choice`."""
    weights = model.weights_of(choice)
    compute = choice.parts * _compute(choice, model, cluster)
    sent = messages(choice, weights, cluster)
    # With recomputed blocks the backward pass holds another forward pass.
    forward = compute / (4 if choice.checkpoint == "block" else 3)
    exposed = _exposed(sent, "forward", forward) + _exposed(sent, "backward", compute - forward)
    if choice.offload and choice.sharded:
        passes = choice.parts * (2 if choice.reshard else 1) + 1
        exposed += passes * 4 * weights.shard(choice.shards) / ASSUMED.pcie
    return Step(compute, exposed, _optimizer_time(choice, weights, cluster))


def _compute(choice: Choice, model: memory.Model, cluster: Cluster) -> float:
    """Forward, loss and backward of one accumulated pass."""
    a, gpu = ASSUMED, cluster.gpu
    matrix = cluster.peak(choice.mode) * gpu.matrix * a.matrix
    speeds = {"matrix": matrix, "unaligned": matrix * a.unaligned,
              "attention": cluster.peak(choice.mode) * gpu.matrix * a.attention}  # fmt: skip
    bandwidth = 1e12 * gpu.bandwidth * a.bandwidth
    rates = {"uneven": bandwidth * a.uneven}
    fused = a.fused if cfg.COMPILE.ENABLED else 1.0
    seconds = launches = 0.0
    for op, count in model.trace_of(choice).ops.items():
        moves = op.kind in ("elementwise", "uneven")
        traffic = op.bytes / rates.get(op.kind, bandwidth) * (fused if moves else 1.0)
        waves = op.tiles / gpu.processors
        # The last wave of tiles takes as long as a full one; small products are cut finer.
        idle = math.ceil(waves) / waves if waves > 1 else 1.0
        seconds += count * max(traffic, op.flops * idle / speeds.get(op.kind, matrix))
        launches += count * (fused if moves else 1.0) * a.launch
    share = a.compiled if cfg.COMPILE.ENABLED else a.eager
    return max(seconds / share, launches) * cluster.scale_compute


def _optimizer_time(choice: Choice, weights: memory.Weights, cluster: Cluster) -> float:
    """Optimizer, loss scale, master copies and EMA."""
    fused, unfused, kernels = _OPTIMIZER[cfg.OPTIM.OPTIMIZER]
    per_weight = fused if cfg.OPTIM.FUSED else unfused
    per_weight += 8 if hardware.arithmetic(choice.mode) == "fp16" else 0
    per_weight += 12 if choice.pure and not choice.sharded else 0
    per_weight += 12 / cfg.OPTIM.EMA_UPDATE_PERIOD if cfg.OPTIM.EMA_UPDATE_PERIOD else 0
    per_weight += 12 if cfg.OPTIM.GRAD_CLIP > 0 else 0
    launches = kernels * (1 if cfg.OPTIM.FUSED or cfg.OPTIM.MTA else len(weights.tensors)) * ASSUMED.launch
    offloaded = choice.offload and choice.sharded
    bandwidth = ASSUMED.host_bandwidth if offloaded else 1e12 * cluster.gpu.bandwidth * ASSUMED.bandwidth
    return max(per_weight * weights.shard(choice.shards) / bandwidth, launches) * cluster.scale_optimizer
