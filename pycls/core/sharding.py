"""The plan for models that outgrow a device: PyTorch's fully_shard."""

import contextlib

import torch
from torch import nn

from pycls.core import distributed as dist
from pycls.core.config import cfg
from pycls.core.errors import UserError
from pycls.core.placement import Single, State, give_values, repeated_blocks


class Sharded(Single):
    """Every process holds a part of the weights, gradients and optimizer state, and gathers each block's weights
    when it computes (ZeRO, arXiv 1910.02054)."""

    name = "fully sharded (torch)"
    shards = True

    @staticmethod
    def check() -> None:
        """Raises UserError where this plan can't be had."""
        if not can_shard(dist.device_type()):
            raise UserError(
                f"FSDP.ENABLED: True needs PyTorch 2.7 or newer on the CPU, and this is {torch.__version__}; use False"
            )

    def cast(self, model: nn.Module) -> nn.Module:
        # The shards are the fp32 master weights; what is gathered from them is cast.
        return model

    def spread(self, model: nn.Module, initial: bool = True) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        options = {
            "mesh": _mesh(self.device.type),
            "mp_policy": self.precision.sharding_policy(),
            "reshard_after_forward": cfg.FSDP.RESHARD_AFTER_FW,
        }
        if cfg.FSDP.CPU_OFFLOAD:
            options["offload_policy"] = CPUOffloadPolicy()
        if cfg.FSDP.LAYER_NORM_FP32:
            self.precision.compute_norms_in_fp32(model)
        blocks = repeated_blocks(model)
        # Part by part, so that no process ever holds more than one part of a blueprint whole.
        for part in (*blocks, model):
            give_values(part, self.drawn_on, leave_out=blocks, initial=initial)
            part.to(self.device)
            fully_shard(part, **options)
        for block, following in zip(blocks, blocks[1:]):
            # Asked for before it is needed, even where the host is late; the backward pass does so by itself.
            block.set_modules_to_forward_prefetch([following])
        return model

    def accumulating(self, last: bool):
        self.raw.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def model_state(self, model: nn.Module, whole: bool = True) -> State:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return get_model_state_dict(model, options=_options(whole))

    def load_model_state(self, model: nn.Module, state: State, strict: bool = True, whole: bool = True) -> None:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(model, state, options=_options(whole, strict=strict))

    def optimizer_state(self, optimizer: torch.optim.Optimizer, whole: bool = True) -> State:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return _by_number(get_optimizer_state_dict(self.raw, optimizer, options=_options(whole)))

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: State, whole: bool = True) -> None:
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        named = _by_name(state, self.raw, optimizer)
        set_optimizer_state_dict(self.raw, optimizer, named, options=_options(whole))
        for group, given in zip(optimizer.param_groups, state["param_groups"]):
            # torch turns tuples (the betas) into lists on the way.
            group.update({key: value for key, value in given.items() if key != "params"})


def can_shard(device_type: str) -> bool:
    """Whether this PyTorch's fully_shard works on the device: it records events, which CPU streams learned late."""
    return device_type != "cpu" or hasattr(torch.cpu.Stream, "record_event")


def _options(whole: bool, **options):
    """Whole tensors in host memory, on rank 0 only when saving; or every process its part."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=whole, cpu_offload=whole, **options)


def _mesh(device_type: str):
    """All processes in one dimension, or (copies, shards) when SHARD_SIZE makes several copies."""
    from torch.distributed.device_mesh import init_device_mesh

    world, size = dist.get_world_size(), cfg.FSDP.SHARD_SIZE or dist.get_world_size()
    if size == world:
        return init_device_mesh(device_type, (world,))
    return init_device_mesh(device_type, (world // size, size), mesh_dim_names=("copies", "shards"))


def _by_number(state: State) -> State:
    """Optimizer state keyed by parameter names -> by their position in the groups, as torch.optim writes it."""
    if not state:
        return state
    names = [name for group in state["param_groups"] for name in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {number[name]: value for name, value in state["state"].items()}, "param_groups": groups}


def _by_name(state: State, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """The inverse of `_by_number`."""
    names = {id(p): name for name, p in model.named_parameters()}
    ordered = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    groups = [{**group, "params": [ordered[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {ordered[i]: value for i, value in state["state"].items()}, "param_groups": groups}
