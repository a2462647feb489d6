"""Optimizers, parameter groups and learning rate schedules."""

import math
from typing import Dict, List

import torch
from torch import nn

from pycls.core.config import cfg
from pycls.core.errors import look_up

# ----------------------------------------------------------------- parameter groups


def _decay_rules():
    """(word in the parameter's name, weight decay), first match wins (PyCls); '' matches everything."""
    o = cfg.OPTIM
    return (
        ("bn", cfg.BN.CUSTOM_WEIGHT_DECAY if cfg.BN.USE_CUSTOM_WEIGHT_DECAY else o.WEIGHT_DECAY),
        ("ln", cfg.LN.CUSTOM_WEIGHT_DECAY if cfg.LN.USE_CUSTOM_WEIGHT_DECAY else o.WEIGHT_DECAY),
        ("bias", o.BIAS_CUSTOM_WEIGHT_DECAY if o.BIAS_USE_CUSTOM_WEIGHT_DECAY else o.WEIGHT_DECAY),
        ("", o.WEIGHT_DECAY),
    )


def parameter_groups(model: nn.Module) -> List[Dict]:
    """Splits the trainable parameters into groups of equal weight decay and learning rate scale.

    Each parameter is in exactly one group. Names of wrappers (`module.`) play no part, so the groups and their
    order depend only on config and model. Empty groups are left out.
    """
    rules, groups = _decay_rules(), {}
    depth = _layer_count(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        rule = next(i for i, (word, _) in enumerate(rules) if word in name)
        scale = cfg.OPTIM.LAYER_DECAY ** (depth + 1 - _layer_of(name, depth)) if cfg.OPTIM.LAYER_DECAY != 1.0 else 1.0
        group = groups.setdefault((rule, -scale), {"params": [], "weight_decay": rules[rule][1], "lr_scale": scale})
        group["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def _layer_count(model: nn.Module) -> int:
    """Number of encoder blocks (0 for models that have none)."""
    return len([name for name, _ in model.named_modules() if name.split(".")[-1].startswith("block_")])


def _layer_of(name: str, depth: int) -> int:
    """0 for the stem and embeddings, i+1 inside block i, depth+1 above: as in BEiT (arXiv 2106.08254)."""
    for part in name.split("."):
        if part.startswith("block_"):
            return int(part[len("block_") :]) + 1
    return 0 if any(word in name for word in ("stem", "pos_embedding", "class_token", "register")) else depth + 1


# ----------------------------------------------------------------------- optimizers


def _sgd(groups, common):
    o = cfg.OPTIM
    return torch.optim.SGD(groups, momentum=o.MOMENTUM, dampening=o.DAMPENING, nesterov=o.NESTEROV, **common)


def _adam(groups, common):
    return torch.optim.Adam(groups, betas=(cfg.OPTIM.BETA1, cfg.OPTIM.BETA2), **common)


def _adamw(groups, common):
    return torch.optim.AdamW(groups, betas=(cfg.OPTIM.BETA1, cfg.OPTIM.BETA2), **common)


_optimizers = {"sgd": _sgd, "adam": _adam, "adamw": _adamw}


def construct_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Builds the optimizer of the config over `model`'s parameter groups.

    OPTIM.FUSED takes torch's fused kernels, OPTIM.MTA the multi-tensor (foreach) ones, neither of them one
    kernel per tensor; all compute the same.
    """
    o = cfg.OPTIM
    common = {
        "lr": o.BASE_LR,
        "weight_decay": o.WEIGHT_DECAY,
        "foreach": o.MTA and not o.FUSED,
        "fused": o.FUSED,
    }
    return look_up(_optimizers, o.OPTIMIZER, "OPTIM.OPTIMIZER")(parameter_groups(model), common)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group (times its layer's scale)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


# ------------------------------------------------------------------------ schedules


def lr_fun_cos(epoch: float) -> float:
    """Cosine from 1 to MIN_LR over MAX_EPOCH (arXiv 1608.03983)."""
    return (1.0 - cfg.OPTIM.MIN_LR) * 0.5 * (1.0 + math.cos(math.pi * epoch / cfg.OPTIM.MAX_EPOCH)) + cfg.OPTIM.MIN_LR


def lr_fun_lin(epoch: float) -> float:
    """Line from 1 to MIN_LR over MAX_EPOCH."""
    return (1.0 - cfg.OPTIM.MIN_LR) * (1.0 - epoch / cfg.OPTIM.MAX_EPOCH) + cfg.OPTIM.MIN_LR


def lr_fun_exp(epoch: float) -> float:
    """Exponential from 1 to MIN_LR (above 0) over MAX_EPOCH."""
    return cfg.OPTIM.MIN_LR ** (epoch / cfg.OPTIM.MAX_EPOCH)


def lr_fun_steps(epoch: float) -> float:
    """LR_MULT to the power of the index of the last of STEPS that has been reached."""
    return cfg.OPTIM.LR_MULT ** ([i for i, step in enumerate(cfg.OPTIM.STEPS) if step <= epoch][-1])


_policies = {"cos": lr_fun_cos, "lin": lr_fun_lin, "exp": lr_fun_exp, "steps": lr_fun_steps}


def get_lr_fun():
    """Returns the schedule that OPTIM.LR_POLICY names: epoch -> factor of BASE_LR."""
    return look_up(_policies, cfg.OPTIM.LR_POLICY, "OPTIM.LR_POLICY")


def get_epoch_lr(epoch: float) -> float:
    """Learning rate at `epoch` (from 0, fractions allowed): BASE_LR * schedule * warm-up."""
    lr = get_lr_fun()(epoch) * cfg.OPTIM.BASE_LR
    if epoch < cfg.OPTIM.WARMUP_EPOCHS:
        alpha = epoch / cfg.OPTIM.WARMUP_EPOCHS
        lr *= cfg.OPTIM.WARMUP_FACTOR * (1.0 - alpha) + alpha
    return lr
