"""The optimizer that updates the weights, and the rows of the plan that only some runs have."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.schema import TrainSection
from trainer.planning.choose.situation import Situation
from trainer.planning.plan import Decision
from trainer.words.sizes import gib

KEY, TRACKER = "train.optimizer", "train.report_to"
PACKAGES = {"adamw_8bit": "bitsandbytes", "prodigy": "prodigyopt"}
"""Package of each optimizer that is not torch's; the extra has the optimizer's own name."""
_WRITTEN = {
    "adamw_8bit": "as written; its state takes a quarter, and each step waits for the device",
    "prodigy": "as written; it finds the rate itself, and each step waits for the device",
    "adamw_stochastic_bf16": "as written; no masters: weights are rounded by chance, 8 bytes a parameter",
}
SPLIT, STOCHASTIC = "adamw_split_bf16", "adamw_stochastic_bf16"
_BETA_2, _DECAY = 0.999, 0.01


def second_beta_and_decay(train: TrainSection) -> tuple[float, float]:
    """`train.adam_beta2` and `train.weight_decay` as numbers."""
    beta_2, decay = train.adam_beta2, train.weight_decay
    return (_BETA_2 if beta_2 == "auto" else beta_2, _DECAY if decay == "auto" else decay)


def optimizer(situation: Situation, *, chosen: str = "", others: int = 0) -> Decision:
    """The optimizer that was written, or the AdamW of the run's type; the one that was `chosen` where that
    needs less memory: `others` are the bytes that the run needs at least with the usual one.
    """
    value, dtype, source = str(situation.config.train.optimizer), situation.dtype, "auto"
    if value in _WRITTEN:
        source, reason = situation.source(KEY), _WRITTEN[value]
    elif chosen == STOCHASTIC:
        value = chosen
        reason = f"weights rounded by chance; with fp32 masters the run needs {gib(others)} at least"
    elif trains_in_bf16(situation):
        value = SPLIT
        reason = "exact fp32 masters in two halves, moments rounded by chance: 10 bytes a parameter"
    else:
        reason = "fp32 throughout" if dtype == "fp32" else f"fp32 masters of the {dtype} adapter"
        value = "adamw_fused_fp32"
    return Decision("optimizer", value, source, reason)


def kinds(situation: Situation) -> tuple[str, ...]:
    """The optimizers that `auto` may take, the one that is better first; one of a run that goes on, whose
    checkpoint has its state.
    """
    usual = optimizer(situation).value
    return (usual, STOCHASTIC) if usual == SPLIT and not situation.goes_on else (usual,)


def trains_in_bf16(situation: Situation) -> bool:
    """True if the trained weights are bf16 themselves."""
    return situation.config.method == "full" and situation.dtype == "bf16"


def rows(situation: Situation) -> Iterator[Decision]:
    """A mean of the weights and a tracker, where they were asked for."""
    train = situation.config.train
    if train.ema_decay is not None:
        source = situation.source("train.ema_decay")
        reason = "files, previews and the validation loss are those of the weights' running mean"
        yield Decision("ema", f"{train.ema_decay:g}", source, reason)
    if train.report_to == "wandb":
        yield situation.decide(TRACKER, "wandb", "")
