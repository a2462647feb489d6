"""AutoAugment (Cubuk et al., arXiv 1805.09501) and RandAugment (arXiv 1909.13719), as in PyCls.

TRAIN.AUGMENT is "AutoAugment", or "RandAugment_N2_M0.5_P0.5": N operations of 15, magnitude M on 0..1, each applied
with probability P (N 2, M 0.5 and P 1 where left out). Differences from the papers: magnitudes are on 0..1, and
operations are "increasing": magnitude 0 leaves the picture as it is where that is possible. What moves in from outside
is grey (128), sampling is bilinear, posterising keeps at least 1 bit. AutoAugment's policies are the 25 "v0" ones of
the EfficientNet release.
"""

import re
from functools import partial
from typing import Callable, Dict

import numpy as np

from pycls.core.errors import UserError

_GREY = (128, 128, 128)
_FORM = re.compile(r"RandAugment(?=_|$)(?:_N(?P<N>\d+))?(?:_M(?P<M>\d*\.?\d+))?(?:_P(?P<P>\d*\.?\d+))?")

# ------------------------------------------------------------- operations on Pillow images


def _affine(image, matrix):
    from PIL import Image

    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=_GREY)


def _rotate(image, degrees):
    from PIL import Image

    return image.rotate(degrees, Image.Resampling.BILINEAR, fillcolor=_GREY)


def _shear_x(image, shear):
    return _affine(image, (1, shear, 0, 0, 1, 0))


def _shear_y(image, shear):
    return _affine(image, (1, 0, 0, shear, 1, 0))


def _translate_x(image, share):
    return _affine(image, (1, 0, share * image.size[0], 0, 1, 0))


def _translate_y(image, share):
    return _affine(image, (1, 0, 0, 0, 1, share * image.size[1]))


def _auto_contrast(image, _):
    from PIL import ImageOps

    return ImageOps.autocontrast(image)


def _equalize(image, _):
    from PIL import ImageOps

    return ImageOps.equalize(image)


def _invert(image, _):
    from PIL import ImageOps

    return ImageOps.invert(image)


def _posterize(image, bits):
    from PIL import ImageOps

    return ImageOps.posterize(image, max(1, round(bits)))


def _solarize(image, threshold):
    from PIL import ImageOps

    return ImageOps.solarize(image, round(threshold))


def _solarize_add(image, added):
    return image.point([min(255, v + round(added)) if v < 128 else v for v in range(256)] * 3)


def _enhance(kind, image, factor):
    from PIL import ImageEnhance

    return getattr(ImageEnhance, kind)(image).enhance(factor)


_OPERATIONS: Dict[str, Callable] = {
    "AutoContrast": _auto_contrast,
    "Equalize": _equalize,
    "Invert": _invert,
    "Rotate": _rotate,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "SolarizeAdd": _solarize_add,
    "Color": partial(_enhance, "Color"),
    "Contrast": partial(_enhance, "Contrast"),
    "Brightness": partial(_enhance, "Brightness"),
    "Sharpness": partial(_enhance, "Sharpness"),
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateX": _translate_x,
    "TranslateY": _translate_y,
}

# What magnitude 0..1 means for each operation, and whether its sign is drawn (left or right, more or less).
_INCREASING = {
    "AutoContrast": (lambda m: 0, False),
    "Equalize": (lambda m: 0, False),
    "Invert": (lambda m: 0, False),
    "Rotate": (lambda m: 30 * m, True),
    "Posterize": (lambda m: 8 - 4 * m, False),
    "Solarize": (lambda m: 256 - 256 * m, False),
    "SolarizeAdd": (lambda m: 110 * m, False),
    "Color": (lambda m: 0.9 * m, True),
    "Contrast": (lambda m: 0.9 * m, True),
    "Brightness": (lambda m: 0.9 * m, True),
    "Sharpness": (lambda m: 0.9 * m, True),
    "ShearX": (lambda m: 0.3 * m, True),
    "ShearY": (lambda m: 0.3 * m, True),
    "TranslateX": (lambda m: 0.45 * m, True),
    "TranslateY": (lambda m: 0.45 * m, True),
}
_AROUND_ONE = {"Color", "Contrast", "Brightness", "Sharpness"}


def apply_operation(image, name: str, magnitude: float, rng: np.random.Generator):
    """Applies one operation, `magnitude` on 0..1, to a Pillow RGB image."""
    scale, signed = _INCREASING[name]
    value = scale(magnitude)
    if signed and rng.random() < 0.5:
        value = -value
    return _OPERATIONS[name](image, 1.0 + value if name in _AROUND_ONE else value)


# ------------------------------------------------------------------------- policies

# (operation, probability, magnitude on 0..10) twice per sub-policy.
_POLICIES = (
    (("Equalize", 0.8, 1), ("ShearY", 0.8, 4)), (("Color", 0.4, 9), ("Equalize", 0.6, 3)),
    (("Color", 0.4, 1), ("Rotate", 0.6, 8)), (("Solarize", 0.8, 3), ("Equalize", 0.4, 7)),
    (("Solarize", 0.4, 2), ("Solarize", 0.6, 2)), (("Color", 0.2, 0), ("Equalize", 0.8, 8)),
    (("Equalize", 0.4, 8), ("SolarizeAdd", 0.8, 3)), (("ShearX", 0.2, 9), ("Rotate", 0.6, 8)),
    (("Color", 0.6, 1), ("Equalize", 1.0, 2)), (("Invert", 0.4, 9), ("Rotate", 0.6, 0)),
    (("Equalize", 1.0, 9), ("ShearY", 0.6, 3)), (("Color", 0.4, 7), ("Equalize", 0.6, 0)),
    (("Posterize", 0.4, 6), ("AutoContrast", 0.4, 7)), (("Solarize", 0.6, 8), ("Color", 0.6, 9)),
    (("Solarize", 0.2, 4), ("Rotate", 0.8, 9)), (("Rotate", 1.0, 7), ("TranslateY", 0.8, 9)),
    (("ShearX", 0.0, 0), ("Solarize", 0.8, 4)), (("ShearY", 0.8, 0), ("Color", 0.6, 4)),
    (("Color", 1.0, 0), ("Rotate", 0.6, 2)), (("Equalize", 0.8, 4), ("Equalize", 0.0, 8)),
    (("Equalize", 1.0, 4), ("AutoContrast", 0.6, 2)), (("ShearY", 0.4, 7), ("SolarizeAdd", 0.6, 7)),
    (("Posterize", 0.8, 2), ("Solarize", 0.6, 10)), (("Solarize", 0.6, 8), ("Equalize", 0.6, 1)),
    (("Color", 0.8, 6), ("Rotate", 0.4, 5)),
)  # fmt: skip

# AutoAugment's own scales, where they are not those above: enhancement factors run from 0.1 to 1.9, posterising
# keeps `magnitude` x 0.4 bits, solarising starts at `magnitude` x 25.6.
_AUTO_VALUES = {
    "Posterize": lambda level: 4 * level / 10,
    "Solarize": lambda level: 256 * level / 10,
    **{name: lambda level: 1.8 * level / 10 + 0.1 for name in _AROUND_ONE},
}


def _auto_augment(image, rng: np.random.Generator):
    for name, probability, level in _POLICIES[rng.integers(len(_POLICIES))]:
        if rng.random() >= probability:
            continue
        if name in _AUTO_VALUES:
            image = _OPERATIONS[name](image, _AUTO_VALUES[name](level))
        else:
            image = apply_operation(image, name, level / 10, rng)
    return image


def _rand_augment(image, rng: np.random.Generator, count: int, magnitude: float, probability: float):
    names = list(_INCREASING)
    for name in rng.choice(names, size=count):
        if rng.random() < probability:
            image = apply_operation(image, str(name), magnitude, rng)
    return image


def _no_augment(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return image


def _on_array(policy: Callable, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Runs a policy for Pillow images on an RGB image (height, width, 3), uint8 or float on 0..1."""
    from PIL import Image

    if image.dtype == np.uint8:
        return np.asarray(policy(Image.fromarray(np.ascontiguousarray(image)), rng))
    picture = Image.fromarray(np.clip(image * 255.0 + 0.5, 0, 255).astype(np.uint8))
    return np.asarray(policy(picture, rng), dtype=np.float32) / 255


def make_augment(text: str) -> Callable[[np.ndarray, np.random.Generator], np.ndarray]:
    """Returns what TRAIN.AUGMENT asks for: (RGB image, uint8 or float on 0..1, generator) -> image alike.

    Raises:
        UserError: the string has no valid form.
    """
    if not text:
        return _no_augment
    if text == "AutoAugment":
        return partial(_on_array, _auto_augment)
    found = _FORM.fullmatch(text)
    values = {k: float(v) for k, v in found.groupdict().items() if v is not None} if found else {}
    if not found or not (0 <= values.get("M", 0) <= 1 and 0 <= values.get("P", 0) <= 1 and values.get("N", 1) >= 1):
        raise UserError(
            f"TRAIN.AUGMENT: {text!r} is not allowed; allowed: '', AutoAugment, RandAugment, RandAugment_N2_M0.5_P0.5 "
            "(N operations, magnitude M and probability P on 0..1)"
        )
    options = {"count": int(values.get("N", 2)), "magnitude": values.get("M", 0.5), "probability": values.get("P", 1.0)}
    return partial(_on_array, partial(_rand_augment, **options))


def validate_augment(text: str) -> None:
    """Raises UserError if TRAIN.AUGMENT is not valid."""
    make_augment(text)
