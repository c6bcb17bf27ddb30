"""Pictures of any mode and colour profile as sRGB of eight bits."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from typing import Any

from PIL import Image, ImageCms
from PIL.TiffImagePlugin import TiffImageFile

COLOUR_VERSION = 1
"""Part of the keys of pictures whose profile is applied: raise it when `to_rgb` gives them other pixels."""
DEPTH_VERSION = 1
"""The same for pictures of other depths than 8 and 16 bits: a version whose entries lack it read 12 as 16."""

_SAME = 1
"""A profile that moves no colour by more than this, of 255, is sRGB: its pictures are left as they are."""
_STRIP_PIXELS = 1 << 20
_PHOTOMETRIC, _MIN_IS_WHITE, _BITS = 262, 0, 258
_MOST_BITS = 16
# modes whose pixels a profile of each colour space describes; a grey picture in an RGB profile is no mistake
# that changes anything, but it cannot be applied
_MODES: dict[str, str] = {"RGB ": "RGB", "CMYK": "CMYK", "GRAY": "L", "Lab ": "LAB"}


class UnreadableModeError(Exception):
    """The picture's values cannot be told as colours; says what they are."""


def profile_state(image: Image.Image) -> tuple[str, str]:
    """(how the colours become sRGB, why the profile is not applied); both empty where there is none to apply.

    The first is part of cache keys; the second is for people.
    """
    _, found = _applying(image.info.get("icc_profile"), image)
    return ("", found) if isinstance(found, str) else (f"icc {COLOUR_VERSION}", "")


def depth_state(image: Image.Image) -> str:
    """The conversion to eight bits as a part of cache keys; empty for pictures of 8 and of 16 bits."""
    bits = _bits(image)
    return f"{bits} bits {DEPTH_VERSION}" if bits != _MOST_BITS else ""


def to_rgb(image: Image.Image) -> Image.Image:
    """RGB in sRGB: by the embedded profile where there is one, laid over white, grey spread to all channels.

    Every pixel by itself, so a large picture goes strip by strip: it would take six copies of itself else.

    Profiles are applied with relative colorimetric intent and black point compensation; 12 and 16 bits become
    8 by their upper ones, before that. Raises UnreadableModeError for floating point, 32-bit and signed
    values, and for 16 bits with a transparent one.
    """
    # PIL turns a TIFF that counts from white round for eight bits only
    inverted, bits = _tags(image).get(_PHOTOMETRIC) == _MIN_IS_WHITE, _bits(image)
    if image.width * image.height <= _STRIP_PIXELS:
        return _strip_to_rgb(image, inverted=inverted, bits=bits)
    whole, rows = Image.new("RGB", image.size), max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        whole.paste(_strip_to_rgb(strip, inverted=inverted, bits=bits), (0, top))
    return whole


def _tags(image: Image.Image) -> Mapping[int, Any]:
    """Tags of a TIFF that PIL holds in 16 bits; none of other pictures."""
    return image.tag_v2 if isinstance(image, TiffImageFile) and image.mode == "I;16" else {}


def _bits(image: Image.Image) -> int:
    """Bits of a grey value in the file, where PIL holds 16; 16 for all other pictures."""
    bits: int = _tags(image).get(_BITS, (_MOST_BITS,))[0]
    return bits


def _strip_to_rgb(image: Image.Image, *, inverted: bool, bits: int) -> Image.Image:
    """`to_rgb` of what is small enough for several copies; `inverted`: `bits` that count from white."""
    icc = image.info.get("icc_profile")
    image = _eight_bits(image, inverted=inverted, bits=bits)
    alpha = None
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        alpha = layer.getchannel("A")
        image = image.convert("L") if image.mode == "LA" else layer.convert("RGB")
    mode, profile = _applying(icc, image)
    if not isinstance(profile, str):
        flat = _applied(image if image.mode == mode else image.convert(mode), profile)
    elif image.mode == "LAB":
        flat = _applied(image, _lab_transform())
    else:
        flat = image.convert("RGB")
    if alpha is None:
        return flat
    layer = flat.convert("RGBA")
    layer.putalpha(alpha)
    return Image.alpha_composite(Image.new("RGBA", flat.size, "white"), layer).convert("RGB")


def _eight_bits(image: Image.Image, *, inverted: bool, bits: int) -> Image.Image:
    """The picture with values of eight bits: PIL's own conversion clips at 255, to white. One that had more
    has no profile afterwards. `bits` of grey, 12 or 16, are what a file has where PIL holds 16.
    """
    import numpy as np

    if image.mode == "F":
        raise UnreadableModeError("floating point values, of which nobody says what is white")
    if not image.mode.startswith("I"):
        return image
    if "transparency" in image.info:
        raise UnreadableModeError("16 bits, of which one value means transparent")
    values = np.asarray(image)  # nothing wider, pictures may be huge
    if values.dtype.itemsize > 2:  # small values are no 16 bits: by their upper half they would be black
        raise UnreadableModeError("values of 32 bits, or with a sign, of which nobody says what is white")
    if inverted:
        values = (1 << bits) - 1 - values
    return Image.fromarray((values >> (bits - 8)).astype(np.uint8))


def _applied(image: Image.Image, transform: ImageCms.ImageCmsTransform) -> Image.Image:
    result = ImageCms.applyTransform(image, transform)
    assert result is not None, "only in place there is none"
    return result


def _applying(icc: object, image: Image.Image) -> tuple[str, ImageCms.ImageCmsTransform | str]:
    """(the mode whose channels a profile of this picture describes, how the profile `icc` is applied to it).

    The second is a text where it is not applied: why, or empty where there is none, or no need.
    """
    mode = image.mode
    if mode not in ("CMYK", "LAB"):
        mode = "L" if mode in ("L", "LA", "1") or mode.startswith("I") else "RGB"
    found = _transform(icc, mode) if isinstance(icc, bytes) and icc else ""
    return mode, found if isinstance(found, str) or not _is_srgb(found, mode) else ""


@functools.lru_cache(maxsize=64)
def _transform(icc: bytes, mode: str) -> ImageCms.ImageCmsTransform | str:
    """Transform from a profile's colours to sRGB, or why it cannot be applied to a picture of this mode."""
    intent, flags = ImageCms.Intent.RELATIVE_COLORIMETRIC, ImageCms.Flags.BLACKPOINTCOMPENSATION
    try:
        profile, srgb = ImageCms.ImageCmsProfile(io.BytesIO(icc)), ImageCms.createProfile("sRGB")
        space = profile.profile.xcolor_space
        if _MODES.get(space) != mode:
            return f"its colour profile is for {space.strip() or 'nothing'}, not for its own channels"
        return ImageCms.buildTransform(profile, srgb, mode, "RGB", renderingIntent=intent, flags=flags)
    except (ImageCms.PyCMSError, OSError, ValueError) as error:
        return f"its colour profile cannot be read ({error})"


@functools.lru_cache(maxsize=1)
def _lab_transform() -> ImageCms.ImageCmsTransform:
    lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
    # a table in between, as is usual, is off by up to 19 of 255 where Lab leaves sRGB
    return ImageCms.buildTransform(lab, srgb, "LAB", "RGB", flags=ImageCms.Flags.NOOPTIMIZE)


@functools.lru_cache(maxsize=64)
def _is_srgb(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    """True if the profile leaves a grid of colours unchanged: a profile's name says little."""
    import numpy as np

    if mode not in ("RGB", "L"):
        return False
    levels = np.linspace(0, 255, 256 if mode == "L" else 9).round().astype(np.uint8)
    if mode == "L":
        grid = levels[None]
        plain = np.repeat(grid[..., None], 3, axis=2)
    else:
        grid = plain = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(1, -1, 3)
    shown = np.asarray(_applied(Image.fromarray(grid), transform))
    return int(np.abs(shown.astype(int) - plain.astype(int)).max()) <= _SAME
