"""The configuration that a LoRA file is used with, by what the file and what lies beside it say."""

from __future__ import annotations

from pathlib import Path

from trainer.cli.output import say
from trainer.config.reading.load import Loaded
from trainer.errors import DataError, one_line


def with_file(loaded: Loaded, file: Path) -> Loaded:
    """The configuration to load a LoRA file with: as `with_template`; and a DoRA and a LoKr read the base's
    weights, which the plan then leaves as they are.

    Raises ConfigError where the configuration asks for another storage, and as `require_family_of`.
    """
    from trainer.config.reading.load import with_settings

    kind, config = require_family_of(file, loaded.config.family), loaded.config
    loaded = with_template(loaded, file)
    if kind == "lora" or config.method != "lora" or config.lora.type == kind:
        return loaded
    # what makes training fast is not for them, and is nothing to this job
    fast = {"features.compile": "auto", "features.cuda_graphs": "auto", "features.activation_budget": "auto"}
    given = {"lora.type": kind, "lora.dropout": 0.0, **fast}
    return with_settings(loaded, given, f"by its tensors, {one_line(file)} is of this type")


def with_template(loaded: Loaded, file: Path) -> Loaded:
    """The configuration with the chat template that lies beside a LoRA file, where it says nothing of one: a
    LoRA that was trained on another than the base's own has it there. Says so.
    """
    from trainer import families
    from trainer.config.reading.load import with_settings
    from trainer.config.tree import by_user
    from trainer.ways import chat_templates

    beside = file.absolute().with_name(chat_templates.BESIDE)  # of a link in a download its own folder counts
    writes = families.get(loaded.config.family).sample_kind == "conversation"
    if not writes or by_user(loaded.sources[chat_templates.KEY]) or not beside.is_file():
        return loaded
    say(f"chat template: {one_line(beside)}, which lies beside the LoRA", err=True)
    return with_settings(
        loaded, {chat_templates.KEY: str(beside)}, f"{one_line(beside)} lies beside the LoRA"
    )


def require_family_of(file: Path, family: str) -> str:
    """The kind of a LoRA file. Raises DataError where it says that it is of a family whose model has other
    blocks, before anything is downloaded.
    """
    from trainer.families.lora_file import require_family

    try:
        with file.open("rb") as opened:
            return require_family(opened, str(file), family)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(file)) from error
