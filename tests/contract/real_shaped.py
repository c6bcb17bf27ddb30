"""Runs on `tests/data/real_shaped`, made small by configuration: few pixels, few steps."""

from __future__ import annotations

import json
from pathlib import Path

from tests.contract.runs import ROOT, draws, edits

REAL_SHAPED = ROOT / "tests" / "data" / "real_shaped"
RESOLUTION = 96
STEPS, CHECKPOINT_STEP = 4, 2
CHATS = REAL_SHAPED / "chats.jsonl"
SHORT_WORDS, SHORT_TOKENS = 800, 2000


def short_chats(folder: Path) -> Path:
    """A file in `folder` of the conversations but for the longest, whose attention takes seconds a step."""
    rows = [line for line in CHATS.read_text(encoding="utf-8").splitlines() if _words(line) < SHORT_WORDS]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CHATS.name
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path


def _words(line: str) -> int:
    return sum(len(message["content"].split()) for message in json.loads(line)["messages"])


def one_set(family: str, chats: Path = CHATS) -> str:
    """The item of `data.sets` that a family reads, as a flow mapping in YAML."""
    if not draws(family):
        return f"{{chat_file: {chats}}}"
    if edits(family):
        return f"{{img_dir: {REAL_SHAPED / 'edits'}, control_dir: {REAL_SHAPED / 'controls'}}}"
    return f"{{img_dir: {REAL_SHAPED / 'pictures'}}}"


def settings(family: str, chats: Path = CHATS) -> tuple[str, ...]:
    """`--set` values beside the small run's: no previews, two samples held out, whole captions."""
    tokens = 512 if draws(family) else 6600 if chats == CHATS else SHORT_TOKENS
    return (
        f"data.sets=[{one_set(family, chats)}]",
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
