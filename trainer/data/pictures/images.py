"""Pictures from files, cut to a bucket, as pixels. Torch is imported only where tensors are made."""

from __future__ import annotations

import hashlib
import io
import struct
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageFile, UnidentifiedImageError, features

from trainer.data.pictures.colour import UnreadableModeError, depth_state, profile_state, to_rgb
from trainer.data.pictures.formats import FORMATS_TEXT
from trainer.data.records import CENTRED, View
from trainer.errors import DataError, OutOfMemoryError

if TYPE_CHECKING:
    import torch

CROP_VERSION = 1
"""Part of every latents entry's key: raise it when `read_image`, `fit` or `to_pixels` gives other pixels."""

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "AVIF")
_MAX_FILE_BYTES = 512 * 1024**2
# PIL reads all of a webp and of an avif to tell its size
_MOST_READ_WHOLE = 2 * 1024**2
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

# kinds of files that only look like a picture: (offset, first bytes, name)
_SIGNATURES: tuple[tuple[int, bytes, str], ...] = (
    (0, b"GIF8", "a GIF image"),
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

# raised by PIL on damaged files
_DECODE_ERRORS = (
    OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, TypeError, KeyError, IndexError,
    OverflowError, RuntimeError, ArithmeticError,
)  # fmt: skip
_AVIF_BRANDS = (b"ftypavif", b"ftypavis")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Size and colours of a picture that was decoded, and the hash of its file."""

    width: int
    """Width in pixels after EXIF orientation; `height` likewise."""
    height: int
    colour: str
    """Conversion of its colours to sRGB of eight bits, see `colour.profile_state` and `colour.depth_state`;
    empty where it is the usual one.
    """
    unapplied: str
    """Why its colour profile is not applied, in words; else empty."""
    content_sha256: str
    """Hash of the file's bytes."""
    depth: str = ""
    """The part of `colour` that masks depend on too, whose profile is not applied."""


def read_bytes(path: Path, content_sha256: str | None = None) -> bytes:
    """The file's bytes. Raises DataError when it cannot be read, is empty or larger than 512 MiB, and where
    a hash is given that they have no longer.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            what = f"the file has {size / 1024**2:.0f} MiB, more than {_MAX_FILE_BYTES // 1024**2} MiB"
            raise DataError(what, where=str(path), remedy="save the picture smaller, or remove it")
        data = path.read_bytes()
    except OSError as error:
        what = f"the file cannot be read: {error.strerror or error}"
        remedy = "check that it exists, its permissions and the disk"
        raise DataError(what, where=str(path), remedy=remedy) from error
    if not data:
        raise DataError("the file is empty (0 bytes)", where=str(path), remedy="copy it again, or remove it")
    if content_sha256 is not None and hashlib.sha256(data).hexdigest() != content_sha256:
        what = "the file has changed since the data set was checked"
        remedy = "leave the data set alone while a run starts, and start again"
        raise DataError(what, where=str(path), remedy=remedy)
    return data


def claimed_pixels(data: bytes) -> int:
    """How many pixels the file says it has, before anything is decoded; 0 where it cannot be told."""
    try:
        with warnings.catch_warnings(action="ignore"):
            width, height = Image.open(io.BytesIO(data), formats=_FORMATS).size
    except (Image.DecompressionBombError, *_DECODE_ERRORS):
        return 0
    return width * height


def claimed_size(path: Path) -> tuple[int, int] | None:
    """Width and height that the picture's first bytes say it has, upright by the EXIF orientation there.

    None where they do not say it, and of files that would be read whole for it and are large; nothing is
    decoded, and nothing checked.
    """
    try:
        with path.open("rb") as file:
            head = file.read(12)
        if (head[8:] == b"WEBP" or head[4:8] == b"ftyp") and path.stat().st_size > _MOST_READ_WHOLE:
            return None
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=_FORMATS) as image:
            width, height = image.size
            # PIL decodes a png to look for EXIF behind the pixels, and has turned the size of a tiff already
            behind = image.format == "PNG" and "exif" not in image.info
            exif = {} if behind or image.format == "TIFF" else image.getexif()
            on_its_side = exif.get(_EXIF_ORIENTATION, 1) in _ORIENTATIONS_ON_THEIR_SIDE
    except (Image.DecompressionBombError, MemoryError, *_DECODE_ERRORS):
        return None
    return (height, width) if on_its_side else (width, height)


def measure(data: bytes, where: str) -> Measured:
    """Size, colours and hash of a picture that was decoded to its last byte.

    The format is told by the content, not by the name. Raises DataError that starts with `where`.
    """
    image, orientation = _decode(data, where)
    width, height = image.size
    if orientation in _ORIENTATIONS_ON_THEIR_SIDE:
        width, height = height, width
    profile, unapplied = profile_state(image)
    depth = depth_state(image)
    if image.mode == "F" or image.mode.startswith("I"):
        _flat(image, where)  # whether its values are colours is in them
    digest = hashlib.sha256(data).hexdigest()
    return Measured(
        width=width,
        height=height,
        colour=" ".join(part for part in (profile, depth) if part),
        unapplied=unapplied,
        content_sha256=digest,
        depth=depth,
    )


def read_image(path: Path, *, content_sha256: str | None = None) -> Image.Image:
    """The picture as sRGB of eight bits: upright by its EXIF orientation, over white, its profile applied.

    With `content_sha256` the file must still have that hash, or DataError is raised, as for a file that
    cannot be decoded.
    """
    image, orientation = _decode(read_bytes(path, content_sha256), str(path))
    flat = _flat(image, str(path))
    del image  # a picture may be 0.7 GB: no more copies at a time than there have to be
    return _upright(flat, orientation)


def read_mask(path: Path, *, content_sha256: str | None = None) -> Image.Image:
    """A mask as grey of eight bits ("L"), upright; colours by their luminance. Raises as `read_image`, and
    for one that is transparent anywhere: other trainers count that as black, painters as what lies below.
    """
    image, orientation = _decode(read_bytes(path, content_sha256), str(path))
    # its values are numbers, not colours: a profile says nothing about them
    image.info.pop("icc_profile", None)
    flat = _flat(image, str(path))
    if image.has_transparency_data:
        layer = image if "A" in image.getbands() else image.convert("RGBA")
        if layer.getchannel("A").getextrema()[0] != 255:
            remedy = "save it without transparency, white where it counts and black elsewhere"
            raise DataError("the mask is transparent in places", where=str(path), remedy=remedy)
    return _upright(flat, orientation).convert("L")


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else image


def _flat(image: Image.Image, where: str) -> Image.Image:
    try:
        return to_rgb(image)
    except UnreadableModeError as error:
        remedy = "convert it to plain 8 or 16 bits, or remove it"
        raise DataError(f"the picture holds {error}", where=where, remedy=remedy) from error


def crop_box(
    size: tuple[int, int], bucket: tuple[int, int], view: View = CENTRED
) -> tuple[float, float, float, float]:
    """Left, top, right and bottom, in pixels of a picture of `size`, of the largest part of a bucket's shape.

    `view` says where the part lies. The bucket's width over that of the part is how much it is enlarged.
    """
    (width, height), (bucket_width, bucket_height) = size, bucket
    scale = max(bucket_width / width, bucket_height / height)
    kept_width, kept_height = min(bucket_width / scale, width), min(bucket_height / scale, height)
    left, top = (width - kept_width) * view.place[0], (height - kept_height) * view.place[1]
    # rounding may put an outermost part a hair outside
    return left, top, min(left + kept_width, width), min(top + kept_height, height)


def fit(image: Image.Image, bucket_width: int, bucket_height: int, view: View = CENTRED) -> Image.Image:
    """The part in `crop_box`, resampled to the bucket's size with Lanczos, mirrored where `view` says so.

    Scaling and cropping are one step with fractional borders, so that a picture is never stretched.
    """
    bucket = (bucket_width, bucket_height)
    box = crop_box(image.size, bucket, view)
    cut = image.resize(bucket, Image.Resampling.LANCZOS, box=box)
    return cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if view.flip else cut


def to_pixels(image: Image.Image) -> torch.Tensor:
    """Pixels (3, H, W) float32 in [-1, 1] of an RGB image."""
    import numpy as np
    import torch

    values = torch.from_numpy(np.array(image, dtype=np.uint8))
    return (values.permute(2, 0, 1).to(torch.float32) / 127.5 - 1.0).contiguous()


def _decode(data: bytes, where: str) -> tuple[ImageFile.ImageFile, int]:
    """The fully decoded picture and its EXIF orientation."""
    if data[4:12] in _AVIF_BRANDS and not features.check("avif"):
        what = "the file holds an AVIF image, which this installation's Pillow cannot read"
        remedy = "install a Pillow with AVIF (its wheels have it since 11.3), or convert the file to png"
        raise DataError(what, where=where, remedy=remedy)
    try:
        with warnings.catch_warnings(action="ignore"):
            # PIL warns of odd metadata and of large pictures, which are no reason to warn a user
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            _refuse_more_frames(image, where)
            image.load()
            orientation = _orientation(image, where)
    except Image.DecompressionBombError as error:
        what = "the picture claims more than 178 million pixels, which may be a decompression bomb"
        raise DataError(what, where=where, remedy="scale it down, or remove it") from error
    except MemoryError as error:
        # no fault of the picture's: left out it would change the data
        what = "the host's memory does not suffice to decode the picture"
        remedy = "give the run more memory, stop what else runs there, or scale the picture down"
        raise OutOfMemoryError(what, where=where, remedy=remedy) from error
    except _DECODE_ERRORS as error:
        what, remedy = _undecodable(data, error)
        raise DataError(what, where=where, remedy=remedy) from error
    return image, orientation


def _orientation(image: Image.Image, where: str) -> int:
    """The EXIF orientation of a picture that is loaded, since png may carry EXIF behind the pixels; 1 without
    one. Raises DataError where it cannot be told.
    """
    try:
        found = image.getexif().get(_EXIF_ORIENTATION, 1)
    except _DECODE_ERRORS as error:
        what = f"the picture is whole, and the EXIF block in it is damaged: {error}"
        remedy = "save the picture again, or remove the block: exiftool -exif:all= FILE"
        raise DataError(what, where=where, remedy=remedy) from error
    return found if isinstance(found, int) else 1


def _refuse_more_frames(image: Image.Image, where: str) -> None:
    """Raise DataError where there is a second frame or page; the extras of a phone's jpg are neither."""
    if image.format == "MPO":
        return  # PIL's name for a jpg with a second picture, which is a depth or gain map
    try:
        image.seek(1)
    except EOFError:
        image.seek(0)
        return
    paged = image.format == "TIFF"
    what, part = ("the file has several pages", "page") if paged else ("the picture is animated", "frame")
    raise DataError(what, where=where, remedy=f"save the {part} that you want as a picture of its own")


def _undecodable(data: bytes, error: Exception) -> tuple[str, str]:
    """Why the picture cannot be decoded, in the words that help most, and what to do."""
    start = data[:64].lstrip()
    for offset, signature, name in () if data[4:12] in _AVIF_BRANDS else _SIGNATURES:
        if start[offset : offset + len(signature)] == signature:
            return f"the file holds {name}; {FORMATS_TEXT}", "convert it to png, or remove it"
    remedy = "copy or download it again, or remove it"
    if isinstance(error, UnidentifiedImageError):
        return f"the file is not a picture, or its start is damaged; {FORMATS_TEXT}", remedy
    return f"the picture is damaged or cut off: {error}", remedy
