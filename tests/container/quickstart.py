"""A short quickstart as the words of a container, and what such a run must leave."""

from __future__ import annotations

from pathlib import Path

from tests.container.boxes import Box
from trainer.errors import ExitCode

QUICKSTART = "/opt/trainer/train_configs/quickstart.yaml"
SHORT = (
    "train.train_batch_size=2",
    "train.lr_warmup_steps=0",
    "validation.prompts=[]",
    "validation.img_dir=null",
)


def words(steps: int, *overrides: str) -> list[str]:
    """A short quickstart as words for the image."""
    settings = (*SHORT, f"train.max_train_steps={steps}", *overrides)
    return ["train", QUICKSTART, *(word for text in settings for word in ("--set", text))]


def steps_saved(output: Path, run: str = "quickstart") -> list[str]:
    """Names of the whole checkpoints, oldest first; one that is still written ends in ``.tmp``."""
    folders = (output / run / "checkpoints").glob("step-*")
    return sorted(folder.name for folder in folders if folder.suffix != ".tmp")


def require_proved(box: Box, output: Path, *, owner: int) -> None:
    """The run ended well, with a LoRA that was proved and belongs to the user of the run."""
    assert box.exit_code() == ExitCode.OK, box.log()
    assert "Proved: reloaded from disk" in box.log()
    for name in ("quickstart.safetensors", "quickstart.comfyui.safetensors"):
        file = output / "quickstart" / "lora" / name
        assert file.stat().st_size > 10_000
        assert file.stat().st_uid == owner
