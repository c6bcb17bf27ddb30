"""The tokenizer of a language model beside its result, with the chat template that the run named.

transformers reads it from the adapter's folder, or from the model's, so that conversations are written there
as they were learned.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.families.conversations import answer_end, open_tokenizer
from trainer.files import atomic
from trainer.modeling.base.base import tokenizer_files
from trainer.ways import chat_templates

if TYPE_CHECKING:
    from trainer.modeling.base.source import ModelSource

GENERATION_FILE = "generation_config.json"
_NOT_OF_TOKENIZERS = ("adapter_config.json",)


def write_chat_files(source: ModelSource, folder: Path) -> None:
    """Write tokenizer and template into `folder`; nothing where the run names no template.

    generation_config.json ends generation at the token that ends the template's answers, besides the base's
    own. Raises StorageError.
    """
    if source.chat_template is None:
        return
    for file in tokenizer_files(source.folder):
        if file.name not in _NOT_OF_TOKENIZERS:
            atomic.copy_file(file, folder / file.name)
    # transformers prefers this file to what tokenizer_config.json says
    atomic.write_text(folder / chat_templates.BESIDE, source.chat_template)
    found = source.folder / GENERATION_FILE
    with atomic.reading_told(found):
        generation: dict[str, Any] = json.loads(found.read_text()) if found.is_file() else {}
    ends = _ends(source, generation.get("eos_token_id"))
    if ends:
        text = json.dumps({**generation, "eos_token_id": ends}, indent=2, sort_keys=True) + "\n"
        atomic.write_text(folder / GENERATION_FILE, text)


def _ends(source: ModelSource, before: int | list[int] | None) -> list[int]:
    """The tokens that end generation: those of before, the tokenizer's and the template's own."""
    tokenizer, _ = open_tokenizer(source)
    listed = before if isinstance(before, list) else [before]
    return sorted({*listed, tokenizer.eos_token_id, answer_end(tokenizer)} - {None})
