"""A plug-in: a model and a loss of your own, used by name from any config.

    run_net.py --mode train --plugin docs/examples/plugin.py --cfg configs/quickstart/vit_digits.yaml \
        MODEL.TYPE patch_mlp MODEL.LOSS_FUN focal

A model is a class that builds itself from the config when called without arguments; a loss maps
(logits (batch, classes), soft labels (batch, classes)) to a scalar. Keys of your own go into `cfg` here.
"""

import torch
from torch import nn

from pycls.core.builders import register_loss_fun, register_model
from pycls.core.config import CfgNode, cfg

cfg.PATCH_MLP = CfgNode({"WIDTH": 64})


class PatchMLP(nn.Module):
    """Embeds patches, averages them, classifies."""

    def __init__(self):
        super().__init__()
        width, patch = cfg.PATCH_MLP.WIDTH, cfg.TRAIN.IM_SIZE // 4
        self.embed = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.ln = nn.LayerNorm(width * 16)
        self.hidden = nn.Linear(width * 16, width)
        self.head = nn.Linear(width, cfg.MODEL.NUM_CLASSES)

    def forward(self, images):
        """images: (batch, 3, side, side). Returns logits (batch, classes)."""
        return self.head(self.hidden(self.ln(self.embed(images).flatten(1))).relu())


class FocalLoss(nn.Module):
    """Cross entropy that weighs easy samples down (Lin et al., arXiv 1708.02002), gamma 1."""

    def forward(self, logits, soft_labels):
        """Both (batch, classes). Returns a scalar."""
        log_probabilities = nn.functional.log_softmax(logits, dim=-1)
        focus = 1.0 - torch.exp(log_probabilities)
        return -(soft_labels * focus * log_probabilities).sum(dim=-1).mean()


register_model("patch_mlp", PatchMLP)
register_loss_fun("focal", FocalLoss)
