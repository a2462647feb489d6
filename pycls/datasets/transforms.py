"""Image transforms on arrays (height, width[, channels]); random ones take their generator as an argument."""

import math
from typing import Callable, Tuple

import cv2
import numpy as np

# ImageNet, RGB on 0..1.
MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)
# Principal components of ImageNet's RGB values (Krizhevsky et al. 2012, AlexNet).
_EIGENVALUES = np.array([0.2175, 0.0188, 0.0045])
_EIGENVECTORS = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear, not antialiased (OpenCV's INTER_LINEAR), as PyCls trained its models."""
    if image.shape[:2] == (height, width):
        return image
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)


def scale_shorter_side(image: np.ndarray, size: int) -> np.ndarray:
    """Resizes so that the shorter side is `size`; the other one is truncated to an integer (PyCls)."""
    height, width = image.shape[:2]
    if min(height, width) == size:
        return image
    if width < height:
        return resize(image, int(size * height / width), size)
    return resize(image, size, int(size * width / height))


def center_crop(image: np.ndarray, size: int) -> np.ndarray:
    """Cuts the middle size x size out, offsets rounded up (PyCls)."""
    height, width = image.shape[:2]
    top, left = math.ceil((height - size) / 2), math.ceil((width - size) / 2)
    return image[top : top + size, left : left + size]


def random_sized_crop(
    image: np.ndarray,
    size: int,
    rng: np.random.Generator,
    min_area: float = 0.08,
    tries: int = 10,
    convert: Callable[[np.ndarray], np.ndarray] = lambda part: part,
) -> np.ndarray:
    """A crop of min_area..1 of the area and 3/4..4/3 in aspect, resized to size x size (Szegedy et al., arXiv
    1409.4842); after `tries` crops that don't fit, the middle of the scaled image.

    Args:
        convert: what to do to pixels before they are resized; done to those only that are used.
    """
    height, width = image.shape[:2]
    for _ in range(tries):
        area = rng.uniform(min_area, 1.0) * height * width
        aspect = rng.uniform(3 / 4, 4 / 3)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if rng.random() < 0.5:
            w, h = h, w
        if 0 < h <= height and 0 < w <= width:
            top, left = rng.integers(height - h + 1), rng.integers(width - w + 1)
            return resize(convert(image[top : top + h, left : left + w]), size, size)
    return center_crop(scale_shorter_side(convert(image), size), size)


def random_flip(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Mirrors left and right with chance 1/2."""
    return image[:, ::-1] if rng.random() < 0.5 else image


def random_pad_crop(image: np.ndarray, size: int, padding: int, rng: np.random.Generator) -> np.ndarray:
    """Pads with zeros and cuts size x size out anywhere (CIFAR)."""
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    top, left = rng.integers(padded.shape[0] - size + 1), rng.integers(padded.shape[1] - size + 1)
    return padded[top : top + size, left : left + size]


def random_affine(
    image: np.ndarray, rng: np.random.Generator, degrees: float, shift: float, scale: float, shear: float
) -> np.ndarray:
    """Rotates, shifts (a share of the side), scales and shears about the centre, edges filled with 0."""
    side = image.shape[0]
    angle, skew = math.radians(rng.uniform(-degrees, degrees)), rng.uniform(-shear, shear)
    zoom_x, zoom_y = 1 + rng.uniform(-scale, scale, size=2)
    offset = rng.uniform(-shift, shift, size=2) * side
    rotation = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    linear = rotation @ np.array([[zoom_x, skew], [0.0, zoom_y]])
    centre = np.full(2, (side - 1) / 2)
    matrix = np.column_stack([linear, centre + offset - linear @ centre])
    return cv2.warpAffine(image, matrix, (side, side), flags=cv2.INTER_LINEAR)


def lighting_shift(strength: float, rng: np.random.Generator) -> np.ndarray:
    """Noise (3,) along the principal components of ImageNet's colours, for an RGB image on 0..1 (AlexNet)."""
    if strength == 0:
        return np.zeros(3, dtype=np.float32)
    return (_EIGENVECTORS @ (rng.normal(0.0, strength, size=3) * _EIGENVALUES)).astype(np.float32)


def lighting(image: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Adds `lighting_shift` to an RGB image on 0..1."""
    return image + lighting_shift(strength, rng) if strength else image


def normalize(image: np.ndarray, order: str) -> np.ndarray:
    """An RGB image (height, width, 3) on 0..1 -> normalised (3, height, width), channels in `order` (bgr or rgb)."""
    image = (image - MEAN) / STD
    return (image[:, :, ::-1] if order == "bgr" else image).transpose(2, 0, 1)


def normalize_later(image: np.ndarray, shift: np.ndarray, order: str) -> Tuple[np.ndarray, np.ndarray]:
    """What `normalize` does to a uint8 image, left to the device: a quarter of the bytes travel.

    Args:
        image: uint8 BGR (height, width, 3). shift: RGB on 0..1, added first. order: of the output channels.
    Returns:
        uint8 (3, height, width), and float32 (2, 3): factor and summand of each channel.
    """
    affine = np.stack([1 / (255 * STD), (shift - MEAN) / STD]).astype(np.float32)
    image = image if order == "bgr" else image[:, :, ::-1]
    return image.transpose(2, 0, 1), affine[:, ::-1] if order == "bgr" else affine


def to_float(image: np.ndarray) -> np.ndarray:
    """uint8 BGR (height, width, 3) -> float32 RGB on 0..1."""
    return image[:, :, ::-1].astype(np.float32) / 255


def prepare_test_image(image: np.ndarray, size: int, crop: int, order: str) -> np.ndarray:
    """What testing, prediction and export make of a decoded picture.

    Args:
        image: uint8 BGR (height, width, 3). size: shorter side before the crop. crop: side of the crop.
        order: of the output channels, bgr (as PyCls's models expect) or rgb.
    Returns:
        float32 (3, crop, crop).
    """
    image = to_float(image)
    return normalize(center_crop(scale_shorter_side(image, size), crop), order)


def channel_order(wanted: str, own: str) -> Tuple[str]:
    """DATA_LOADER.CHANNEL_ORDER resolved: a data set's own order when it says auto."""
    return own if wanted == "auto" else wanted
