"""The family and the kind of a LoRA file, by its header. No torch."""

from __future__ import annotations

from typing import BinaryIO

from trainer import families
from trainer.errors import DataError
from trainer.files.adapter_kind import adapter_kind
from trainer.files.safetensors import UNREADABLE, HeaderError, read_header


def require_family(file: BinaryIO, where: str, family: str) -> str:
    """The kind of a LoRA file, as in `lora.type`. Raises DataError where it says that it is of a family whose
    model has other blocks, and for a file that is no safetensors.

    Families with the same blocks take each other's files, such as a model of images and the one that edits
    them; files of other trainers do not name their family.
    """
    try:
        header = read_header(file)
    except HeaderError as error:
        raise DataError(f"cannot be read as safetensors ({error})", where=where, remedy=UNREADABLE) from error
    said = header.metadata.get("family", family)
    if said in families.names() and families.get(said).blocks != families.get(family).blocks:
        raise DataError(
            f"it says that it is a LoRA of {said}, and the configuration is of {family}",
            where=where,
            remedy=f"give a configuration with family: {said}",
        )
    return adapter_kind(header.tensors)
