"""A trained model from its checkpoint alone: the config, the class names and the better weights are inside."""

import json
import os
from typing import Dict, List, NamedTuple, Optional, Sequence

import torch
from torch import nn

from pycls.core import builders, checkpoint, config
from pycls.core.errors import UserError
from pycls.core.io import cache_url, default_cache_dir
from pycls.datasets import loader
from pycls.datasets.base import Preparation


class SavedModel(NamedTuple):
    """A model in evaluation mode, the names of its classes, and how pictures become its input."""

    model: nn.Module
    class_names: List[str]
    preparation: Preparation
    model_type: str


def load_saved(path: str, cfg_file: Optional[str] = None, overrides: Sequence = ()) -> SavedModel:
    """Builds the model of a checkpoint, a path or URL; the global config is left as it was.

    Args:
        cfg_file: the config of bare weights, which hold none. overrides: [KEY, VALUE, ...].
    Raises:
        UserError: no config inside and none given, or the weights don't fit it.
    """
    path = cache_url(path, default_cache_dir())
    content = checkpoint.read_checkpoint(path)
    with config.temporary_cfg() as cfg:
        if cfg_file:
            config.load_cfg(cfg_file)
        elif isinstance(content.get("cfg"), str):
            # Written by another version perhaps: what it has more than this one does not concern the model.
            cfg.merge_from_text(content["cfg"], f"config in {path}", skip_unknown=True)
        else:
            raise UserError(f"{path}: holds weights but no config; give one with --cfg")
        cfg.merge_from_list(list(overrides))
        model = builders.build_model()
        checkpoint.load_checkpoint(path, model)
        names = list(content.get("class_names") or _names_beside(path) or ())
        # A model may have more classes than its data had: those go by their numbers.
        names += [str(i) for i in range(len(names), cfg.MODEL.NUM_CLASSES)]
        preparation = loader.preparation(cfg.TEST.DATASET or "imagenet")
        return SavedModel(model.eval(), names, preparation, cfg.MODEL.TYPE)


def _names_beside(path: str) -> Optional[List[str]]:
    """Class names from a classes.json in the checkpoint's folder, or the one above."""
    for folder in (os.path.dirname(path), os.path.dirname(os.path.dirname(os.path.abspath(path)))):
        file = os.path.join(folder, "classes.json")
        if os.path.isfile(file):
            with open(file, encoding="utf-8") as f:
                return json.load(f)
    return None


@torch.no_grad()
def predict(saved: SavedModel, images: Sequence, most: int = 5) -> List[List[Dict]]:
    """The most probable classes of decoded pictures (uint8 BGR arrays): [{"class": name, "probability": p}, ...]."""
    inputs = torch.stack([torch.from_numpy(saved.preparation.prepare(image).copy()) for image in images])
    probabilities = saved.model(inputs).float().softmax(dim=1)
    values, indices = probabilities.topk(min(most, probabilities.shape[1]), dim=1)
    return [
        [{"class": saved.class_names[i], "probability": p} for p, i in zip(*rows)]
        for rows in zip(values.tolist(), indices.tolist())
    ]
