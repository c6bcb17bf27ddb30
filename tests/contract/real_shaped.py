"""Runs on `tests/data/real_shaped`, made small by configuration: few pixels, few steps."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.contract.runs import ROOT, draws, edits

REAL_SHAPED = ROOT / "tests" / "data" / "real_shaped"
RESOLUTION = 96
STEPS, CHECKPOINT_STEP = 4, 2
CHATS = REAL_SHAPED / "chats.jsonl"
FEW_PICTURES = (0, 1, 16, 21, 25, 26, 31, 33, 38, 41, 42, 47, 48, 58)
FEW_EDITS = (0, 2, 4, 5, 6, 8, 10, 11, 12, 13, 15, 17, 20, 22)
FEW_CHATS = (0, 3, 4, 10, 25, 30, 31, 32, 33, 36, 42, 43, 45, 54, 57)
"""Numbers of samples that are spread as the whole set is: captions of 1 to 300 tokens, every aspect ratio in
several sizes; conversations of a few tokens to more than a thousand; two languages.
"""


def few(family: str, folder: Path) -> str:
    """A `--set` value for copies in `folder` of a few samples that are spread as the whole set is."""
    folder.mkdir(parents=True)
    if not draws(family):
        rows = CHATS.read_text(encoding="utf-8").splitlines()
        path = folder / CHATS.name
        path.write_text("".join(f"{rows[number]}\n" for number in FEW_CHATS), encoding="utf-8")
        return f"data.sets=[{{chat_file: {path}}}]"
    numbers = FEW_EDITS if edits(family) else FEW_PICTURES
    for name in ("edits", "controls") if edits(family) else ("pictures",):
        (folder / name).mkdir()
        for number in numbers:
            for path in (REAL_SHAPED / name).glob(f"{number:02d}.*"):
                shutil.copy(path, folder / name)
    if not edits(family):
        return f"data.sets=[{{img_dir: {folder / 'pictures'}}}]"
    rows = (REAL_SHAPED / "edits" / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    path = folder / "edits" / "metadata.jsonl"
    path.write_text("".join(f"{rows[number]}\n" for number in numbers), encoding="utf-8")
    return f"data.sets=[{{img_dir: {folder / 'edits'}, control_dir: {folder / 'controls'}}}]"


def one_set(family: str) -> str:
    """The item of `data.sets` that a family reads, as a flow mapping in YAML."""
    if not draws(family):
        return f"{{chat_file: {CHATS}}}"
    if edits(family):
        return f"{{img_dir: {REAL_SHAPED / 'edits'}, control_dir: {REAL_SHAPED / 'controls'}}}"
    return f"{{img_dir: {REAL_SHAPED / 'pictures'}}}"


def settings(family: str) -> tuple[str, ...]:
    """`--set` values beside the small run's: no previews, two samples held out, whole captions."""
    tokens = 512 if draws(family) else 6600
    return (
        f"data.sets=[{one_set(family)}]",
        f"data.resolution={RESOLUTION}",
        f"data.max_sequence_length={tokens}",
        "data.caption_dropout_rate=" + ("0.1" if draws(family) else "0"),
        f"train.max_train_steps={STEPS}",
        "train.log_every_steps=1",
        f"checkpoint.checkpointing_steps={CHECKPOINT_STEP}",
        "validation.prompts=[]",
        "validation.held_out=2",
        f"validation.every_steps={STEPS}",
    )
