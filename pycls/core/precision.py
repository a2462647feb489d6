"""Arithmetic: one policy object that says in which dtype to compute and how to step.

Nothing else in the program asks about dtypes. The modes:

    fp32      plain                          tf32      fp32 storage, TF32 matrix products on CUDA
    amp_fp16  autocast, dynamic loss scale   amp_bf16  autocast, no loss scale needed
    fp16      16-bit weights and activations, fp32 master weights, dynamic loss scale
    bf16      the same without a loss scale
"""

import contextlib
import types
from typing import Callable, Dict, List, Optional

import torch
from torch import nn
from torch.nn import functional as F

from pycls.core import distributed as dist
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.logging import get_logger

logger = get_logger(__name__)

_DTYPES = {"fp32": None, "tf32": None, "amp_fp16": torch.float16, "amp_bf16": torch.bfloat16,
           "fp16": torch.float16, "bf16": torch.bfloat16}  # fmt: skip


def mode_of_config() -> str:
    """The mode that is in force: PRECISION.MODE, or what TRAIN.MIXED_PRECISION stands for on this device."""
    if cfg.PRECISION.MODE:
        return cfg.PRECISION.MODE
    if not cfg.TRAIN.MIXED_PRECISION:
        return "fp32"
    return "amp_fp16" if dist.device_type() == "cuda" else "amp_bf16"


class Precision:
    """The policy of one run. In order: `cast` the model, build the optimizer, `attach` it, then per step
    `autocast` around the forward pass, `backward` and `step`."""

    def __init__(self, mode: Optional[str] = None, device: Optional[torch.device] = None):
        self.mode = mode or mode_of_config()
        self.device = device or dist.get_device()
        self.dtype = _DTYPES[self.mode]
        self.pure = self.mode in ("fp16", "bf16")
        self.scaler = self._new_scaler(torch.amp.GradScaler)
        self.master = _Master()
        self.unscale_apart = False
        # Steps that an overflow made the scaler skip: in all, and in a row until now. On the device, as counting is.
        self.skipped = torch.zeros(2, device=self.device)
        self._say_if_useless()
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = self.mode == "tf32"
            torch.backends.cudnn.allow_tf32 = self.mode == "tf32"

    def _say_if_useless(self) -> None:
        """Warns where the hardware emulates the mode."""
        if self.dtype is torch.float16 and self.device.type == "cpu":
            logger.warning("PRECISION.MODE %s is emulated on the CPU, and slow; amp_bf16 is the useful one", self.mode)
        if self.dtype is torch.bfloat16 and self.device.type == "cuda" and torch.cuda.get_device_capability()[0] < 8:
            logger.warning("PRECISION.MODE %s is emulated on this GPU, and slow; amp_fp16 is the useful one", self.mode)

    def _new_scaler(self, kind):
        return kind(
            self.device.type,
            init_scale=cfg.PRECISION.LOSS_SCALE,
            growth_interval=cfg.PRECISION.GROWTH_INTERVAL,
            enabled=self.dtype is torch.float16,
        )

    def share_overflows(self) -> None:
        """Makes all processes skip a step in which any saw an overflow, for gradients that are plain local slices."""
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        self.scaler = self._new_scaler(ShardedGradScaler)
        # It compares notes only then, while a fused optimizer would unscale and step in one.
        self.unscale_apart = True

    def sharding_policy(self):
        """fully_shard's policy: gather weights in the compute dtype, keep the shards (the master weights) in fp32."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        reduce = torch.float32 if cfg.PRECISION.REDUCE_DTYPE == "fp32" else self.dtype
        return MixedPrecisionPolicy(self.dtype, reduce if self.dtype else None)

    def cast(self, model: nn.Module) -> nn.Module:
        """Gives the model its storage dtype (16 bit in the pure modes, norms excepted with NORM_FP32)."""
        if self.pure:
            model.to(self.dtype)
            model.register_forward_pre_hook(lambda _, args: tuple(a.to(self.dtype) for a in args))
            if cfg.PRECISION.NORM_FP32:
                _keep_norms_fp32(model, self.dtype)
        return model

    def compute_norms_in_fp32(self, model: nn.Module) -> None:
        """Makes layer norms compute in fp32 between layers that don't, of weights in any dtype."""
        # Sharded with their block and not by themselves: that would be messages and graph breaks for a few numbers.
        for module in model.modules() if self.dtype is not None else ():
            if isinstance(module, nn.LayerNorm):
                module.forward = types.MethodType(_fp32_layer_norm, module)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes `optimizer` step fp32 master weights in place of 16-bit ones (call before its first step)."""
        self.master = _Master(optimizer)

    def exact_weights(self, model: nn.Module, state: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """`state`, of `model`, with each 16-bit weight replaced by its fp32 master."""
        masters = self.master.by_weight()
        return {**state, **{n: masters[id(p)].detach() for n, p in model.named_parameters() if id(p) in masters}}

    def load_exact_weights(self, model: nn.Module, state: Dict[str, torch.Tensor]) -> None:
        """Sets the masters of `model`'s weights from a state, of any precision."""
        masters = self.master.by_weight()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if id(parameter) in masters and name in state:
                    masters[id(parameter)].copy_(state[name])

    def forward(self, model: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """Runs `model` on images (batch, channels, height, width); logits come back in at least fp32 for the loss."""
        with self.autocast():
            logits = model(images)
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits

    def autocast(self):
        """Context in which the forward pass computes."""
        if self.dtype is None or self.pure:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Back-propagates the (scaled) loss."""
        self.scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer, clip: Callable[[List[torch.Tensor]], None]) -> None:
        """Unscales the gradients, clips the true ones, and steps unless any is not finite under a loss scale."""
        self.master.take_gradients()
        if cfg.OPTIM.GRAD_CLIP > 0 or self.unscale_apart:
            self.scaler.unscale_(optimizer)
        if cfg.OPTIM.GRAD_CLIP > 0:
            clip([p for group in optimizer.param_groups for p in group["params"]])
        self.scaler.step(optimizer)
        self._count_skipped(optimizer)
        self.scaler.update()
        self.master.give_weights()

    def _count_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        if self.scaler.is_enabled():
            found = sum(self.scaler._found_inf_per_device(optimizer).values())
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            self.skipped.add_(found).mul_(torch.stack([torch.ones_like(found), found]).view(2))

    def report(self) -> Dict[str, float]:
        """Loss scale and number of skipped steps, for the log; waits for the device. Empty without a loss scale.

        Raises:
            UserError: MAX_SKIPPED steps were skipped in a row.
        """
        if not self.scaler.is_enabled():
            return {}
        skipped, in_a_row = self.skipped.tolist()
        if in_a_row >= cfg.PRECISION.MAX_SKIPPED:
            raise UserError(
                f"PRECISION.MODE: {self.mode} skipped {in_a_row:.0f} steps in a row as gradients were not finite (loss "
                f"scale {self.scaler.get_scale():g}); the last checkpoint is untouched. Try a lower OPTIM.BASE_LR or "
                "PRECISION.MODE amp_bf16"
            )
        return {"loss_scale": self.scaler.get_scale(), "skipped": int(skipped)}

    def in_words(self) -> str:
        """', loss scale 1024' for messages; '' without a loss scale. Waits for the device."""
        return f", loss scale {self.scaler.get_scale():g}" if self.scaler.is_enabled() else ""

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Drops the gradients of the last step."""
        optimizer.zero_grad(set_to_none=True)
        self.master.zero_grad()

    def state_dict(self) -> Dict:
        """Loss scale and growth counter; empty when the mode has no loss scale."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: Dict) -> None:
        """Takes up a saved loss scale; a state from a mode without one changes nothing."""
        if self.scaler.is_enabled() and state:
            self.scaler.load_state_dict(state)


def _keep_norms_fp32(model: nn.Module, dtype: torch.dtype) -> None:
    """Stores norms in fp32 and casts around them, since statistics in 16 bit lose too much."""
    norms = (nn.LayerNorm, nn.modules.batchnorm._BatchNorm)
    for module in model.modules():
        if isinstance(module, norms):
            module.float()
            module.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
            module.register_forward_hook(lambda _, args, output: output.to(dtype))


def _fp32_layer_norm(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    weight, bias = (None if t is None else t.float() for t in (norm.weight, norm.bias))
    return F.layer_norm(x.float(), norm.normalized_shape, weight, bias, norm.eps).to(x.dtype)


class _Master:
    """fp32 copies of 16-bit weights, which the optimizer steps in their place; of others there are none.

    An update far smaller than a weight would vanish in 16-bit addition; the copy keeps it. All moves are
    multi-tensor kernels.
    """

    def __init__(self, optimizer: Optional[torch.optim.Optimizer] = None):
        self.weights: List[torch.Tensor] = []
        self.copies: List[torch.Tensor] = []
        for group in optimizer.param_groups if optimizer else ():
            group["params"] = [self._copy_of(p) for p in group["params"]]
        # Kept from step to step; a copy whose weight had no gradient goes without.
        self.gradients = [torch.zeros_like(copy) for copy in self.copies]

    def _copy_of(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter.dtype not in (torch.float16, torch.bfloat16):
            return parameter
        copy = nn.Parameter(parameter.detach().float())
        self.weights.append(parameter)
        self.copies.append(copy)
        return copy

    def by_weight(self) -> Dict[int, torch.Tensor]:
        """The copies by the id of the weight that they stand for."""
        return {id(weight): copy for weight, copy in zip(self.weights, self.copies)}

    def take_gradients(self) -> None:
        """Moves the gradients to the copies."""
        used = [i for i, weight in enumerate(self.weights) if weight.grad is not None]
        for i in used:
            self.copies[i].grad = self.gradients[i]
        if used:
            torch._foreach_copy_([self.gradients[i] for i in used], [self.weights[i].grad for i in used])

    @torch.no_grad()
    def give_weights(self) -> None:
        """Rounds the copies into the model."""
        if self.weights:
            torch._foreach_copy_(self.weights, self.copies)

    def zero_grad(self) -> None:
        """Drops the 16-bit gradients (the optimizer drops those of the copies)."""
        for weight in self.weights:
            weight.grad = None
