"""Floor 4: pictures from files, cut to a bucket, as pixels. Torch is imported only where tensors are made."""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageFile, UnidentifiedImageError

from trainer.errors import DataError

if TYPE_CHECKING:
    import torch

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
FORMATS_TEXT = "png, jpg, jpeg and webp are read"
CROP_VERSION = 1
"""Part of every latents entry's key: raise it when `read_image`, `fit` or `to_pixels` gives other pixels."""

_FORMATS = ("PNG", "JPEG", "WEBP")
_MAX_FILE_BYTES = 512 * 1024**2
_EXIF_ORIENTATION = 0x0112
_TRANSPOSE: dict[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATIONS_ON_THEIR_SIDE = frozenset({5, 6, 7, 8})

# What files turn out to be that only look like a picture: (offset, first bytes, name).
_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"GIF8", "a GIF image"),
    (0, b"BM", "a BMP image"),
    (0, b"II*\x00", "a TIFF image"),
    (0, b"MM\x00*", "a TIFF image"),
    (4, b"ftypavif", "an AVIF image"),
    (4, b"ftyphei", "a HEIC image"),
    (4, b"ftypmif1", "a HEIC image"),
    (4, b"ftyp", "a video"),
    (0, b"%PDF", "a PDF document"),
    (0, b"PK\x03\x04", "a zip archive"),
    (0, b"<svg", "an SVG drawing"),
    (0, b"<?xml", "an XML file"),
    (0, b"<", "a web page"),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the picture itself (git lfs pull fetches it)"),
)

# What PIL raises on damaged files.
_DECODE_ERRORS = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)


def read_bytes(path: Path) -> bytes:
    """The file's bytes. Raises DataError when it cannot be read, is empty or larger than 512 MiB."""
    try:
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise DataError(
                f"the file has {size / 1024**2:.0f} MiB, more than {_MAX_FILE_BYTES // 1024**2} MiB",
                where=str(path),
                remedy="save the picture smaller, or remove it",
            )
        data = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"the file cannot be read: {error.strerror or error}",
            where=str(path),
            remedy="check that it exists, its permissions and the disk",
        ) from error
    if not data:
        raise DataError("the file is empty (0 bytes)", where=str(path), remedy="copy it again, or remove it")
    return data


def measure(data: bytes, where: str) -> tuple[int, int]:
    """Width and height in pixels after EXIF orientation, of a picture that was decoded to its last byte.

    The format is told by the content, not by the name. Raises DataError that starts with `where`.
    """
    image, orientation = _decode(data, where)
    width, height = image.size
    return (height, width) if orientation in _ORIENTATIONS_ON_THEIR_SIDE else (width, height)


def read_image(path: Path, *, content_sha256: str | None = None) -> Image.Image:
    """The picture as RGB: upright by its EXIF orientation, laid over white, grey spread to three channels.

    Colour profiles are not applied. With `content_sha256` the file must still have that hash, or DataError is
    raised, as for a file that cannot be decoded.
    """
    data = read_bytes(path)
    if content_sha256 is not None and hashlib.sha256(data).hexdigest() != content_sha256:
        raise DataError(
            "the file has changed since the data set was checked",
            where=str(path),
            remedy="leave the data set alone while a run starts, and start again",
        )
    image, orientation = _decode(data, str(path))
    flat = _to_rgb(image)
    return flat.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else flat


def fit(image: Image.Image, bucket_width: int, bucket_height: int) -> Image.Image:
    """The largest centred part of the bucket's shape, resampled to the bucket's size with Lanczos.

    Scaling and cropping are one step with fractional borders, so that a picture is never stretched.
    """
    width, height = image.size
    scale = max(bucket_width / width, bucket_height / height)
    kept_width, kept_height = min(bucket_width / scale, width), min(bucket_height / scale, height)
    left, top = (width - kept_width) / 2, (height - kept_height) / 2
    box = (left, top, left + kept_width, top + kept_height)
    return image.resize((bucket_width, bucket_height), Image.Resampling.LANCZOS, box=box)


def to_pixels(image: Image.Image) -> torch.Tensor:
    """Pixels (3, H, W) float32 in [-1, 1] of an RGB image."""
    import numpy as np
    import torch

    values = torch.from_numpy(np.array(image, dtype=np.uint8))
    return (values.permute(2, 0, 1).to(torch.float32) / 127.5 - 1.0).contiguous()


def _decode(data: bytes, where: str) -> tuple[ImageFile.ImageFile, int]:
    """The fully decoded picture and its EXIF orientation."""
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        _refuse_animation(image, where)
        image.load()
        # after load(): png may carry EXIF behind the pixels
        orientation = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Image.DecompressionBombError as error:
        raise DataError(
            "the picture claims more than 178 million pixels, which may be a decompression bomb",
            where=where,
            remedy="scale it down, or remove it",
        ) from error
    except _DECODE_ERRORS as error:
        raise DataError(_undecodable(data, error), where=where, remedy=_remedy(data)) from error
    return image, orientation if isinstance(orientation, int) else 1


def _refuse_animation(image: Image.Image, where: str) -> None:
    """Raise DataError when a png or webp has a second frame; the extras of a phone's jpg are no frames."""
    if image.format == "MPO":
        return  # what PIL makes of a jpg with a second picture: a depth or gain map
    try:
        image.seek(1)
    except EOFError:
        return
    raise DataError(
        "the picture is animated", where=where, remedy="save the frame that you want as a picture of its own"
    )


def _to_rgb(image: Image.Image) -> Image.Image:
    """RGB of any mode that png, jpg and webp have."""
    if image.mode.startswith("I"):
        # 16-bit grey: PIL's own conversion clips at 255, which gives a white picture
        import numpy as np

        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _disguise(data: bytes) -> str:
    """What the bytes are instead of a picture that is read, or an empty text."""
    start = data[:64].lstrip()
    for offset, signature, name in _SIGNATURES:
        if start[offset : offset + len(signature)] == signature:
            return name
    return ""


def _undecodable(data: bytes, error: Exception) -> str:
    """Why the picture cannot be decoded, in the words that help most."""
    disguise = _disguise(data)
    if disguise:
        return f"the file holds {disguise}; {FORMATS_TEXT}"
    if isinstance(error, UnidentifiedImageError):
        return f"the file is not a picture, or its start is damaged; {FORMATS_TEXT}"
    return f"the picture is damaged or cut off: {error}"


def _remedy(data: bytes) -> str:
    """What to do about a file that cannot be decoded."""
    if _disguise(data):
        return "convert it to png, or remove it"
    return "copy or download it again, or remove it"
