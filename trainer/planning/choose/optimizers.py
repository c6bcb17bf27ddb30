"""The optimizer that updates the weights, and the rows of the plan that only some runs have."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.schema import TrainSection
from trainer.planning.choose.situation import Situation
from trainer.planning.plan import Decision

KEY, TRACKER = "train.optimizer", "train.report_to"
PACKAGES = {"adamw_8bit": "bitsandbytes", "prodigy": "prodigyopt"}
"""Package of each optimizer that is not torch's; the extra has the optimizer's own name."""
_WRITTEN = {
    "adamw_8bit": "as written; its state takes a quarter, and each step waits for the device",
    "prodigy": "as written; it finds the rate itself, and each step waits for the device",
}
KAHAN, SPLIT = "adamw_kahan_bf16", "adamw_split_bf16"
_USUAL, IN_BF16 = (0.999, 0.01), (0.99, 0.0)
"""Second beta and weight decay of AdamW, and of its compensated variant, whose state is in bf16."""
SECOND_MOMENT = (
    "a second moment in bf16 has steps of 0.4 %, and one step of such a decay changes it by less: it would"
    " never fall"
)
NO_DECAY = "weights in bf16 are rounded back after a step of decay, which is far below their precision"


def second_beta_and_decay(train: TrainSection, kind: str) -> tuple[float, float]:
    """`train.adam_beta2` and `train.weight_decay` as an optimizer of the plan takes them."""
    beta_2, decay = IN_BF16 if kind == KAHAN else _USUAL
    asked = train.adam_beta2, train.weight_decay
    return (beta_2 if asked[0] == "auto" else asked[0], decay if asked[1] == "auto" else asked[1])


def optimizer(situation: Situation) -> Decision:
    """The optimizer that was written, or the AdamW of the run's type."""
    value, dtype, source = str(situation.config.train.optimizer), situation.dtype, "auto"
    if value in PACKAGES:
        source, reason = situation.source(KEY), _WRITTEN[value]
    elif kahan(situation):
        value, reason = KAHAN, "compensated (Kahan) sums: plain bf16 loses small updates"
    elif trains_in_bf16(situation):
        value = SPLIT
        reason = "exact fp32 masters in two halves, moments rounded by chance: 10 bytes a parameter"
    else:
        reason = "fp32 throughout" if dtype == "fp32" else f"fp32 masters of the {dtype} adapter"
        value = "adamw_fused_fp32"
    return Decision("optimizer", value, source, reason)


def trains_in_bf16(situation: Situation) -> bool:
    """True if the trained weights are bf16 themselves."""
    return situation.config.method == "full" and situation.dtype == "bf16"


def kahan(situation: Situation) -> bool:
    """True if AdamW with compensated (Kahan) sums updates bf16 weights."""
    return situation.config.train.optimizer == "adamw" and trains_in_bf16(situation) and situation.on_gpu


def rows(situation: Situation, kind: str) -> Iterator[Decision]:
    """Values that AdamW in bf16 takes instead of the usual ones; a mean of the weights and a tracker, where
    they were asked for.
    """
    train = situation.config.train
    if kind == KAHAN:
        reasons = {"train.adam_beta2": SECOND_MOMENT, "train.weight_decay": NO_DECAY}
        for (key, reason), value in zip(reasons.items(), second_beta_and_decay(train, kind), strict=True):
            if situation.asked(key) == "auto":
                yield situation.decide(key, f"{value:g}", reason)
    if train.ema_decay is not None:
        source = situation.source("train.ema_decay")
        reason = "files, previews and the validation loss are those of the weights' running mean"
        yield Decision("ema", f"{train.ema_decay:g}", source, reason)
    if train.report_to == "wandb":
        yield situation.decide(TRACKER, "wandb", "")
