"""The published models of PyCls, by name.

    from pycls.models import regnety
    model = regnety("4.0GF", pretrained=True)

Figures and weights are PyCls's ("dds_baselines"); the weights expect BGR images, see `datasets/transforms.py`.
"""

import os
from typing import Dict, List, NamedTuple, Optional, Sequence

from torch import nn

from pycls.core.errors import UserError, nearest

_URL = "https://dl.fbaipublicfiles.com/pycls"


class Entry(NamedTuple):
    """A model: its config (below configs/), and of published weights the id and errors (percent)."""

    config: str
    model_id: Optional[str] = None
    top1_err: Optional[float] = None
    top5_err: Optional[float] = None

    @property
    def url(self) -> Optional[str]:
        """Where the published weights are."""
        if self.model_id is None:
            return None
        name = os.path.splitext(os.path.basename(self.config))[0]
        return f"{_URL}/dds_baselines/{self.model_id}/{name}.pyth"


def _dds(family: str, name: str, model_id: str, top1: float, top5: float) -> Entry:
    return Entry(f"dds_baselines/{family}/{name}_dds_8gpu.yaml", model_id, top1, top5)


# Size -> (model id, top-1 error, top-5 error).
_REGNETX = {
    "200MF": ("160905981", 31.088, 11.342), "400MF": ("160905967", 27.382, 9.076),
    "600MF": ("160906442", 25.864, 8.198),
    "800MF": ("160906036", 24.846, 7.592), "1.6GF": ("160990626", 23.038, 6.484), "3.2GF": ("160906139", 21.736, 5.862),
    "4.0GF": ("160906383", 21.356, 5.736), "6.4GF": ("161116590", 20.844, 5.434), "8.0GF": ("161107726", 20.728, 5.42),
    "12GF": ("160906020", 20.288, 5.284), "16GF": ("158460855", 19.956, 5.022), "32GF": ("158188473", 19.498, 4.878),
}  # fmt: skip
_REGNETY = {
    "200MF": ("176245422", 29.658, 10.378), "400MF": ("160906449", 25.898, 8.07), "600MF": ("160981443", 24.54, 7.28),
    "800MF": ("160906567", 23.684, 6.846), "1.6GF": ("160906681", 22.066, 6.134), "3.2GF": ("160906834", 21.074, 5.454),
    "4.0GF": ("160906838", 20.64, 5.336), "6.4GF": ("160907112", 20.11, 5.1), "8.0GF": ("161160905", 20.052, 5.06),
    "12GF": ("160907100", 19.67, 4.856), "16GF": ("161303400", 19.608, 4.944), "32GF": ("161277763", 19.066, 4.568),
}  # fmt: skip
_RESNET = {"50": ("161235311", 23.19, 6.63), "101": ("161167170", 21.414, 5.792), "152": ("161167467", 20.87, 5.44)}
_RESNEXT = {
    "50": ("161167411", 21.884, 6.062),
    "101": ("161167590", 20.664, 5.392),
    "152": ("162471172", 20.386, 5.318),
}
_EFFNET = {
    "B0": ("161305613", 24.92, 7.814), "B1": ("161304979", 24.068, 7.228), "B2": ("161305015", 23.518, 6.968),
    "B3": ("161305060", 22.47, 6.514), "B4": ("161305098", 21.374, 5.808), "B5": ("161305138", 21.674, 6.238),
}  # fmt: skip
# Published without weights.
_VIT = {
    f"{stem}-{size}GF": f"vitconv_baselines/vit/ViT-{stem}-{size}GF_adamw_{gpus}gpus.yaml"
    for stem in "PC"
    for size, gpus in (("1.0", 8), ("4.0", 8), ("18", 16), ("36", 32))
}

_FAMILIES: Dict[str, Dict[str, Entry]] = {
    "regnetx": {size: _dds("regnetx", f"RegNetX-{size}", *row) for size, row in _REGNETX.items()},
    "regnety": {size: _dds("regnety", f"RegNetY-{size}", *row) for size, row in _REGNETY.items()},
    "resnet": {size: _dds("resnet", f"R-{size}-1x64d", *row) for size, row in _RESNET.items()},
    "resnext": {size: _dds("resnext", f"X-{size}-32x4d", *row) for size, row in _RESNEXT.items()},
    "effnet": {size: _dds("effnet", f"EN-{size}", *row) for size, row in _EFFNET.items()},
    "vit": {size: Entry(config) for size, config in _VIT.items()},
}
_TITLES = {
    "regnetx": "RegNetX-", "regnety": "RegNetY-", "resnet": "ResNet-", "resnext": "ResNeXt-", "effnet": "EfficientNet-",
    "vit": "ViT-",
}  # fmt: skip


def get_model_list() -> List[str]:
    """Full names of all models, e.g. RegNetY-4.0GF."""
    return [_TITLES[family] + size for family, entries in _FAMILIES.items() for size in entries]


def get_model_info(name: str) -> Dict:
    """Facts about a model by its full name.

    Returns:
        config (path), url, model_id and the published top1_err and top5_err (percent), None where not published.
    Raises:
        UserError: unknown name.
    """
    for family, entries in _FAMILIES.items():
        for size, entry in entries.items():
            if _TITLES[family] + size == name:
                return {**entry._asdict(), "config": config_path(entry.config), "url": entry.url}
    raise UserError(f"unknown model {name!r}{nearest(name, get_model_list())}; get_model_list() names all")


def config_path(relative: str) -> str:
    """A published config's file: in the source tree, or in the installed package."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for root in (os.path.join(os.path.dirname(package), "configs"), os.path.join(package, "configs")):
        path = os.path.join(root, relative)
        if os.path.isfile(path):
            return path
    raise UserError(f"{relative}: this config is neither in the source tree nor in the installed package")


def build_model(family: str, size: str, pretrained: bool = False, cfg_list: Sequence = ()) -> nn.Module:
    """Builds a model of the zoo; the caller's global config is left as it was.

    Args:
        pretrained: load the published weights, downloaded once into DOWNLOAD_CACHE.
        cfg_list: config overrides, [KEY, VALUE, ...].
    Raises:
        UserError: unknown size, no published weights, or the download failed.
    """
    from pycls.core import builders, checkpoint, config
    from pycls.core.io import cache_url

    entries = _FAMILIES[family]
    size = size[len(_TITLES[family]) :] if size.startswith(_TITLES[family]) else size
    if size not in entries:
        raise UserError(f"{family}: unknown size {size!r}{nearest(size, entries)}; known: {', '.join(entries)}")
    entry = entries[size]
    if pretrained and entry.url is None:
        raise UserError(f"{_TITLES[family]}{size}: no weights were published; use pretrained=False")
    with config.temporary_cfg() as cfg:
        config.load_cfg(config_path(entry.config))
        cfg.merge_from_list(list(cfg_list))
        config.validate_cfg()
        model = builders.build_model()
        if pretrained:
            checkpoint.load_checkpoint(cache_url(entry.url, cfg.DOWNLOAD_CACHE), model)
    return model


def regnetx(name: str, pretrained: bool = False, cfg_list: Sequence = ()) -> nn.Module:
    """RegNetX by flops: 200MF, 400MF, ..., 32GF."""
    return build_model("regnetx", name, pretrained, cfg_list)


def regnety(name: str, pretrained: bool = False, cfg_list: Sequence = ()) -> nn.Module:
    """RegNetY (with squeeze-and-excitation) by flops: 200MF, 400MF, ..., 32GF."""
    return build_model("regnety", name, pretrained, cfg_list)


def resnet(name: str, pretrained: bool = False, cfg_list: Sequence = ()) -> nn.Module:
    """ResNet by depth: 50, 101, 152."""
    return build_model("resnet", str(name), pretrained, cfg_list)


def resnext(name: str, pretrained: bool = False, cfg_list: Sequence = ()) -> nn.Module:
    """ResNeXt 32x4d by depth: 50, 101, 152."""
    return build_model("resnext", str(name), pretrained, cfg_list)


def effnet(name: str, pretrained: bool = False, cfg_list: Sequence = ()) -> nn.Module:
    """EfficientNet: B0 to B5."""
    return build_model("effnet", name, pretrained, cfg_list)


def vit(name: str, pretrained: bool = False, cfg_list: Sequence = ()) -> nn.Module:
    """ViT with patchify (P) or convolutional (C) stem by flops: P-1.0GF, C-1.0GF, ..., C-36GF."""
    return build_model("vit", name, pretrained, cfg_list)
