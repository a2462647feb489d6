"""Picture files to pixels: one rule for training, testing, prediction and export.

Whatever a file holds (JPEG, PNG, WebP, BMP, TIFF; grey, palette, alpha, CMYK, 16 bit, a rotation tag), the result
is what a viewer would show: uint8, three channels, upright, transparency over white.
"""

import io
from typing import Union

import cv2
import numpy as np

from pycls.core.errors import UserError

# Endings of files that count as pictures, whatever their case.
ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")


def is_hidden(name: str) -> bool:
    """Whether a file or folder is none of the user's pictures, whatever it holds: .DS_Store, .ipynb_checkpoints."""
    return name.startswith(".")


def is_picture(name: str) -> bool:
    """Whether a file counts as a picture: a known ending, and not hidden."""
    return name.lower().endswith(ENDINGS) and not is_hidden(name)


def decode_image(source: Union[str, bytes], decoder: str = "opencv") -> np.ndarray:
    """Decodes a picture file (a path) or its bytes.

    Args:
        decoder: opencv (as PyCls; plain JPEGs only, the rest goes to Pillow) or pillow.
    Returns:
        uint8 (height, width, 3), channels BGR.
    Raises:
        UserError: it can't be read; names the file.
    """
    from PIL import Image, UnidentifiedImageError

    name = source if isinstance(source, str) else "picture"
    try:
        data = _read(source) if isinstance(source, str) else source
        if not data:
            raise OSError("the file is empty")
        image = _decode_jpeg(data) if decoder == "opencv" and data[:3] == b"\xff\xd8\xff" else None
        return image if image is not None else _decode_any(data)
    except UnidentifiedImageError:
        # Pillow would name the buffer.
        raise UserError(f"{name}: can't be read as a picture: its content is of no known kind") from None
    except (OSError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or _first_line(error)
        raise UserError(f"{name}: can't be read as a picture: {reason}") from None
    except (ValueError, SyntaxError, EOFError, MemoryError) as error:
        # What Pillow raises for files that start well and then break the format's rules.
        raise UserError(f"{name}: is damaged: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _read(path: str) -> bytes:
    with open(path, "rb") as f:
        return f.read()


def _decode_jpeg(data: bytes):
    """OpenCV's reading of a grey or RGB JPEG, turned by its tag (as it does by itself); None where it can't tell."""
    # OpenCV 4 fills what a cut-off file lacks with grey; without the end marker Pillow has to judge.
    if _jpeg_channels(data) not in (1, 3) or b"\xff\xd9" not in data[-64:]:
        return None
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)


def _jpeg_channels(data: bytes) -> int:
    """Number of colour channels that a JPEG's frame header announces, 0 when there is none to be found."""
    at = 2
    while at + 9 < len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        # The start-of-frame markers are C0..CF but for three other tables.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return data[at + 9]
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return 0


def _decode_any(data: bytes) -> np.ndarray:
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(data)) as picture:
        picture.load()
        picture = ImageOps.exif_transpose(picture)
        if picture.mode.startswith("I") or picture.mode == "F":
            return _from_deep_grey(np.asarray(picture))
        if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            white = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(white, picture)
        return np.ascontiguousarray(np.asarray(picture.convert("RGB"))[:, :, ::-1])


def _from_deep_grey(values: np.ndarray) -> np.ndarray:
    """Grey of 16 bits, or floats on 0..1, 0..255 or 0..65535, scaled to 8 bits; never clipped: else refused."""
    low, high = values.min(initial=0), values.max(initial=0)
    ranges = (1.0, 255.0, 65535.0) if values.dtype.kind == "f" else (65535.0,)
    full = next((top for top in ranges if high <= top), None)
    if full is None or not low >= 0:
        raise ValueError(f"grey values from {low} to {high} are not those of 16 bits")
    grey = np.rint(values.astype(np.float64) * (255.0 / full)).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)
