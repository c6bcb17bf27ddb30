"""Floor 2: which optimizer updates the weights, and the rows of the plan that only some runs have."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config import extras
from trainer.hardware.choices import Situation
from trainer.hardware.plan import Decision

PACKAGES = {
    "adamw_8bit": ("bitsandbytes", extras.remedy("adamw-8bit")),
    "prodigy": ("prodigyopt", extras.remedy("prodigy")),
}
"""Package of each optimizer that is not torch's, and how it is installed."""
_REASON = {
    "adamw_8bit": "as written; its state takes a quarter, and each step waits for the device",
    "prodigy": "as written; it finds the rate itself, and each step waits for the device",
}


def choose(situation: Situation, dtype: str) -> Decision:
    """The optimizer; raises HardwareError for one whose package is missing, or that would lose updates."""
    method, asked, key = situation.config.method, situation.config.train.optimizer, "train.optimizer"
    if asked != "adamw":
        package, install = PACKAGES[asked]
        if package not in situation.facts.packages:
            what = f"{asked} needs {package}, which is not installed"
            raise situation.refuse(key, what, f"{install}; or leave {key} out")
        if method == "full" and dtype == "bf16":
            what = f"{asked} would round its updates to bf16, which loses the small ones"
            remedy = f"leave {key} out: AdamW with compensated sums needs no more memory than fp32 copies"
            raise situation.refuse(key, what, remedy)
        source, reason = situation.source(key), _REASON[asked]
        return Decision(feature="optimizer", value=asked, source=source, reason=reason)
    if method == "full" and dtype == "bf16":
        value, reason = "adamw_kahan_bf16", "compensated (Kahan) sums: plain bf16 loses small updates"
    else:
        reason = "fp32 throughout" if dtype == "fp32" else f"fp32 masters of the {dtype} adapter"
        value = "adamw_fused_fp32"
    return Decision(feature="optimizer", value=value, source="auto", reason=reason)


def rows(situation: Situation) -> Iterator[Decision]:
    """A mean of the weights and a tracker, where they were asked for; HardwareError for a missing package."""
    train, key = situation.config.train, "train.report_to"
    if train.ema_decay is not None:
        source = situation.source("train.ema_decay")
        reason = "files, previews and the validation loss are those of the weights' running mean"
        yield Decision(feature="ema", value=f"{train.ema_decay:g}", source=source, reason=reason)
    if train.report_to == "wandb":
        if "wandb" not in situation.facts.packages:
            what = "wandb is not installed"
            raise situation.refuse(key, what, f"{extras.remedy('wandb')}; or leave {key} out")
        yield Decision(feature="report_to", value="wandb", source=situation.source(key), reason="as written")
