"""The family of a LoRA file, by the metadata in its header. No torch."""

from __future__ import annotations

from typing import BinaryIO

from trainer import families
from trainer.errors import DataError
from trainer.files.safetensors import UNREADABLE, HeaderError, read_header


def require_family(file: BinaryIO, where: str, family: str) -> None:
    """Raise DataError where a LoRA file says that it is of a family whose model has other blocks, and for a
    file that is no safetensors.

    Families with the same blocks take each other's files, such as a model of images and the one that edits
    them; files of other trainers do not name their family.
    """
    try:
        said = read_header(file).metadata.get("family", family)
    except HeaderError as error:
        raise DataError(f"cannot be read as safetensors ({error})", where=where, remedy=UNREADABLE) from error
    if said in families.names() and families.get(said).blocks != families.get(family).blocks:
        raise DataError(
            f"it says that it is a LoRA of {said}, and the configuration is of {family}",
            where=where,
            remedy=f"give a configuration with family: {said}",
        )
