"""Runs on `tests/data/real_shaped`, made small by configuration: few pixels, few steps."""

from __future__ import annotations

from tests.contract.runs import ROOT, draws, edits

REAL_SHAPED = ROOT / "tests" / "data" / "real_shaped"
RESOLUTION = 96
STEPS, CHECKPOINT_STEP = 4, 2


def one_set(family: str) -> str:
    """The item of `data.sets` that a family reads, as a flow mapping in YAML."""
    if not draws(family):
        return f"{{chat_file: {REAL_SHAPED / 'chats.jsonl'}}}"
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
