"""Which optimizer updates the weights, and the rows of the plan that only some runs have."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.schema import TrainSection
from trainer.planning.choose.switches import Situation
from trainer.planning.plan import Decision
from trainer.words import extras

PACKAGES = {
    "adamw_8bit": ("bitsandbytes", extras.remedy("adamw-8bit")),
    "prodigy": ("prodigyopt", extras.remedy("prodigy")),
}
"""Package of each optimizer that is not torch's, and how it is installed."""
_REASON = {
    "adamw_8bit": "as written; its state takes a quarter, and each step waits for the device",
    "prodigy": "as written; it finds the rate itself, and each step waits for the device",
}


KAHAN = "adamw_kahan_bf16"
_USUAL, _IN_BF16 = (0.999, 0.01), (0.99, 0.0)
"""Second beta and weight decay of AdamW, and of its compensated variant, whose state is in bf16."""
_BETA_2, _DECAY = "train.adam_beta2", "train.weight_decay"
_SECOND_MOMENT = (
    "a second moment in bf16 has steps of 0.4 %, and one step of such a decay changes it by less: it would"
    " never fall"
)
_NO_DECAY = "weights in bf16 are rounded back after a step of decay, which is far below their precision"


def second_beta_and_decay(train: TrainSection, kind: str) -> tuple[float, float]:
    """`train.adam_beta2` and `train.weight_decay` as an optimizer of the plan takes them."""
    beta_2, decay = _IN_BF16 if kind == KAHAN else _USUAL
    asked = train.adam_beta2, train.weight_decay
    return (beta_2 if asked[0] == "auto" else asked[0], decay if asked[1] == "auto" else asked[1])


def _require_held(situation: Situation) -> None:
    """Raise HardwareError where AdamW in bf16 is asked for what its state cannot hold."""
    train, (most, _) = situation.config.train, _IN_BF16
    other = "or write features.weights: fp32, which needs twice the memory"
    if train.adam_beta2 != "auto" and train.adam_beta2 > most:
        what = f"{train.adam_beta2:g} is too slow for a full fine-tune in bf16: {_SECOND_MOMENT}"
        raise situation.refuse(_BETA_2, what, f"write {most:g} at most, leave {_BETA_2} out, {other}")
    if train.weight_decay not in ("auto", 0.0):
        what = f"{train.weight_decay:g} would do nothing in a full fine-tune in bf16: {_NO_DECAY}"
        raise situation.refuse(_DECAY, what, f"write 0, leave {_DECAY} out, {other}")


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
        _require_held(situation)
        value, reason = KAHAN, "compensated (Kahan) sums: plain bf16 loses small updates"
    else:
        reason = "fp32 throughout" if dtype == "fp32" else f"fp32 masters of the {dtype} adapter"
        value = "adamw_fused_fp32"
    return Decision(feature="optimizer", value=value, source="auto", reason=reason)


def rows(situation: Situation, kind: str) -> Iterator[Decision]:
    """What AdamW in bf16 takes instead of the usual values, and a mean of the weights and a tracker, where
    they were asked for; HardwareError for a missing package.
    """
    train, key = situation.config.train, "train.report_to"
    if kind == KAHAN:
        values = second_beta_and_decay(train, kind)
        asked = (_BETA_2, train.adam_beta2, _SECOND_MOMENT), (_DECAY, train.weight_decay, _NO_DECAY)
        for value, (name, written, reason) in zip(values, asked, strict=True):
            if written == "auto":
                feature = name.partition(".")[2]
                yield Decision(feature=feature, value=f"{value:g}", source="auto", reason=reason)
    if train.ema_decay is not None:
        source = situation.source("train.ema_decay")
        reason = "files, previews and the validation loss are those of the weights' running mean"
        yield Decision(feature="ema", value=f"{train.ema_decay:g}", source=source, reason=reason)
    if train.report_to == "wandb":
        if "wandb" not in situation.facts.packages:
            what = "wandb is not installed"
            raise situation.refuse(key, what, f"{extras.remedy('wandb')}; or leave {key} out")
        yield Decision(feature="report_to", value="wandb", source=situation.source(key), reason="as written")
