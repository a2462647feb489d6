"""From names in the config to models and losses; plug-ins register their own here.

    from pycls.core.builders import register_model
    register_model("my_net", MyNet)        # then MODEL.TYPE my_net

A model is a class that builds itself from the config when called without arguments. It may have
a static `complexity(cx)` (see `pycls/core/net.py`); without one its flops are counted by tracing.
"""

import contextlib
from typing import Callable

import torch

from pycls.core.config import cfg
from pycls.core.errors import look_up
from pycls.core.net import SoftCrossEntropyLoss
from pycls.models.anynet import AnyNet
from pycls.models.effnet import EffNet
from pycls.models.regnet import RegNet
from pycls.models.resnet import ResNet
from pycls.models.vit import ViT

_models = {"anynet": AnyNet, "effnet": EffNet, "regnet": RegNet, "resnet": ResNet, "vit": ViT}
_loss_funs = {"cross_entropy": SoftCrossEntropyLoss}
_HINT = "; what a plug-in registers needs --plugin FILE.py"


def get_model() -> Callable[..., torch.nn.Module]:
    """Returns the model class that MODEL.TYPE names."""
    return look_up(_models, cfg.MODEL.TYPE, "MODEL.TYPE", _HINT)


def get_loss_fun() -> Callable[..., torch.nn.Module]:
    """Returns the loss class that MODEL.LOSS_FUN names."""
    return look_up(_loss_funs, cfg.MODEL.LOSS_FUN, "MODEL.LOSS_FUN", _HINT)


def build_model() -> torch.nn.Module:
    """Builds the model of the config."""
    return get_model()()


def build_blueprint() -> torch.nn.Module:
    """Builds the model of the config, without values yet (on the meta device) if its parts can be given them later.

    That is so for a class that itself defines `reset_parameters`: every module of it initialises its own tensors. Then
    no process ever needs memory for a whole model that is sharded over many. See `placement.give_values`.
    """
    constructor = get_model()
    with torch.device("meta") if "reset_parameters" in vars(constructor) else contextlib.nullcontext():
        return constructor()


def build_loss_fun() -> torch.nn.Module:
    """Builds the loss: (logits (batch, classes), soft labels (batch, classes)) -> scalar."""
    return get_loss_fun()()


def register_model(name: str, ctor: Callable[..., torch.nn.Module]) -> None:
    """Makes `ctor` available as MODEL.TYPE `name`."""
    _models[name] = ctor


def register_loss_fun(name: str, ctor: Callable[..., torch.nn.Module]) -> None:
    """Makes `ctor` available as MODEL.LOSS_FUN `name`."""
    _loss_funs[name] = ctor
