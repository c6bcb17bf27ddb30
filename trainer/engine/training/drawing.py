"""A try: the same prompts with equal seeds without a LoRA, and with each of some LoRA files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from trainer.engine.building.build import load_base
from trainer.engine.caching.entries import Entries, list_entries
from trainer.engine.caching.fill import fill_cache
from trainer.engine.caching.samples import prompt_controls
from trainer.engine.context import Context, apply_backend_settings
from trainer.engine.results import proof
from trainer.engine.results.file_check import check_file
from trainer.engine.training.preview import sample, write_drawn
from trainer.modeling.adapter import lora
from trainer.telemetry.run_folder import tries


def draw_try(context: Context, folder: Path) -> None:
    """Draw the try in `folder` with one load of the base, a column after the other.

    Strength 0 leaves the LoRA out. Raises DataError for a record or a LoRA file that cannot be used.
    """
    apply_backend_settings(context)
    one = tries.read_record(folder)
    controls = prompt_controls(context.family, context.config, ())
    entries = list_entries(context, (), controls, negative_prompt=one.negative_prompt)
    files = [tries.run_of(folder) / name for name in one.loras]
    for file in files:
        check_file(file)
    fill_cache(context, entries)
    model = load_base(context).module
    _draw_column(context, model, entries, folder, 0)
    for column, file in enumerate(files, start=1):
        if one.strength:
            proof.load_lora(context, model, file)
            lora.set_strength(model, one.strength)
        _draw_column(context, model, entries, folder, column)
        if one.strength:
            lora.remove_lora(model)
    context.say(f"pictures: {folder}")


def _draw_column(context: Context, model: Any, entries: Entries, folder: Path, column: int) -> None:
    drawn: Sequence[Image.Image | str] = sample(context, model, entries)
    for row, one in enumerate(drawn):
        write_drawn(context, entries, row, one, tries.picture(folder, column, row))
