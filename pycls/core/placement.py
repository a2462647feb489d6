"""Plans for models that fit on one device: alone, or as one copy per process.

A plan is how a model is spread over processes. `Single` is also the interface: the trainer calls its methods only and
never learns which plan is behind them. The sharded plans are in `sharding.py` and `sharding_fairscale.py`.
"""

import contextlib
from typing import Any, Collection, Dict, Iterator, List, Optional

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pycls.core import ema
from pycls.core.config import cfg
from pycls.core.precision import Precision

State = Dict[str, Any]


class Single:
    """One process holds everything.

    Attributes:
        raw: the model under its own names. model: what the training step calls. ema: its average, or None.
    """

    name = "single process"
    # Whether processes hold different parts, as DTensors.
    shards = False

    def __init__(self, model: nn.Module, average: Optional[nn.Module], precision: Precision, host_values: bool = True):
        """Args: model, average: as built, with values or (blueprints) without; both start from the model's.
        host_values: whether a blueprint's values are drawn on the host, see `trainer.setup_model`."""
        self.precision, self.device = precision, precision.device
        self.drawn_on = torch.device("cpu") if host_values else self.device
        self.raw = self.model = self.cast(self.spread(model))
        self.ema = self.spread(average, initial=False) if average is not None else None
        if average is not None:
            ema.copy_tensors(self.ema, self.raw)

    def spread(self, model: nn.Module, initial: bool = True) -> nn.Module:
        """Gives a blueprint its values (if they are not `initial`, any) and puts the model where it computes."""
        for part in (*repeated_blocks(model), model):
            give_values(part, self.drawn_on, leave_out=repeated_blocks(model), initial=initial)
        return model.to(self.device)

    def cast(self, model: nn.Module) -> nn.Module:
        """Gives the weights that are trained their storage dtype; the average stays in fp32."""
        return self.precision.cast(model)

    def accumulating(self, last: bool):
        """Context of one accumulated pass; gradients need not agree between processes before the `last`."""
        return contextlib.nullcontext()

    def clip_grad_norm(self, parameters: List[torch.Tensor]) -> torch.Tensor:
        """Scales the gradients down to a global norm of at most GRAD_CLIP; returns the norm, on the device."""
        return nn.utils.clip_grad_norm_(parameters, cfg.OPTIM.GRAD_CLIP)

    def outline(self, model: nn.Module) -> State:
        """Tensors with the names and shapes of `model_state`; their values mean nothing."""
        return model.state_dict()

    def model_state(self, model: nn.Module, whole: bool = True) -> State:
        """The state of `model` under its own names. All processes call it.

        Args:
            whole: rank 0 gets whole tensors, in host memory; else every process gets its part, not copied.
        """
        return self.precision.exact_weights(model, model.state_dict())

    def load_model_state(self, model: nn.Module, state: State, strict: bool = True, whole: bool = True) -> None:
        """Takes up what `model_state` gave, whole tensors of any number of processes; not `strict`: or some of them."""
        model.load_state_dict(state, strict=strict)
        self.precision.load_exact_weights(model, state)

    def optimizer_state(self, optimizer: torch.optim.Optimizer, whole: bool = True) -> State:
        """The state of `optimizer`, numbered as by a single process; `whole` as in `model_state`."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: State, whole: bool = True) -> None:
        """Takes up what `optimizer_state` gave, whole tensors of any number of processes."""
        optimizer.load_state_dict(state)


class Replicated(Single):
    """Every process holds a copy; gradients are averaged while the backward pass runs."""

    name = "data parallel (DDP)"

    def __init__(self, model: nn.Module, average: Optional[nn.Module], precision: Precision, host_values: bool = True):
        super().__init__(model, average, precision, host_values)
        ids = [self.device.index] if self.device.type == "cuda" else None
        # Our own models compute the same graph in every step; of accumulated passes only the last one is reduced.
        static = type(self.raw).__module__.startswith("pycls.models.") and cfg.OPTIM.ACCUM_ITERS == 1
        options = {"gradient_as_bucket_view": True, "static_graph": static}
        self.model = DistributedDataParallel(self.raw, device_ids=ids, **options)

    def accumulating(self, last: bool):
        return contextlib.nullcontext() if last else self.model.no_sync()


# ------------------------------------------------------------------ parts of models


def repeated_blocks(model: nn.Module) -> List[nn.Module]:
    """The blocks that a model repeats (`model.repeated_blocks()`, if it says), else none."""
    find = getattr(model, "repeated_blocks", None)
    return list(find()) if find else []


def give_values(
    part: nn.Module, device: torch.device, leave_out: Collection[nn.Module] = (), initial: bool = True
) -> None:
    """Puts what `part` holds on the meta device, if anything, on `device`, and initialises it there.

    Every module below it that holds tensors must have `reset_parameters`, as torch's own do; parts come before wholes.

    Args:
        leave_out: modules that are parts of their own. initial: whether the values matter; else they are arbitrary.
    """
    modules = [m for m in _parts_first(part, leave_out) if any(t.is_meta for t in _own_tensors(m))]
    for module in modules:
        module.to_empty(device=device, recurse=False)
    if modules and initial:
        with torch.no_grad():
            for module in _parts_first(part, leave_out):
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _parts_first(module: nn.Module, leave_out: Collection[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if not any(child is other for other in leave_out):
            yield from _parts_first(child, leave_out)
    yield module
