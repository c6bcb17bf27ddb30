"""Metrics of previews and early stopping that a configuration asks for and cannot have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trainer.config.judging.rule import Clash, Context, Rule
from trainer.config.schema import RunConfig
from trainer.config.value_types import FID_LEAST, KID_LEAST

_METRICS, _EARLY = "validation.metrics", "validation.early_stop"
_LEAST = {
    "kid": (KID_LEAST, "with fewer a subset has less than 25 pictures, whose values scatter widely"),
    "fid": (FID_LEAST, "its bias falls with the number of pictures only"),
}
"""Fewest pictures by metric, and why."""


def validates(config: RunConfig) -> bool:
    """True if samples are held out, so that there is a held-out loss."""
    return bool(config.validation.held_out or config.validation.names_samples)


def _few_prompts(context: Context) -> Iterator[Clash]:
    validation = context.config.validation
    for metric in validation.metrics:
        least, why = _LEAST.get(metric, (0, ""))
        if validation.prompts and len(validation.prompts) < least:
            count = len(validation.prompts)
            yield {"metric": metric, "least": f"{least:,}", "count": f"{count:,}", "why": why}


def _no_second_seed(context: Context) -> bool:
    validation = context.config.validation
    once = all(count == 1 for count in Counter(validation.prompts).values())
    return "diversity" in validation.metrics and bool(validation.prompts) and once


def _unmeasured(context: Context) -> Iterator[Clash]:
    validation = context.config.validation
    if validation.early_stop is None:
        return
    monitor = validation.early_stop.monitor
    if monitor == "validation_loss" and not validates(context.config):
        yield {"monitor": monitor, "why": "nothing is held out", "remedy": "write validation.held_out: 4"}
    elif monitor != "validation_loss" and monitor not in validation.metrics:
        remedy = f"write validation.metrics: [{monitor}]"
        yield {"monitor": monitor, "why": "it is none of validation.metrics", "remedy": remedy}


RULES: tuple[Rule[Context], ...] = (
    Rule((_METRICS, "validation.prompts"),
         lambda at: bool(at.config.validation.metrics) and not at.config.validation.prompts,
         "`validation.metrics` measure previews, and `validation.prompts` is empty",
         "write the prompts to draw, or leave metrics out", at=(_METRICS,)),
    Rule((_METRICS, "validation.prompts"), _few_prompts,
         "`validation.metrics`: {metric} means something from {least} pictures on, and a round draws {count}:"
         " {why}", "leave {metric} out, or draw as many and measure them by `trainer score`", at=(_METRICS,)),
    Rule((_METRICS, "validation.prompts"), _no_second_seed,
         "`validation.metrics`: diversity compares pictures of one prompt, and each is drawn once",
         "write a prompt of validation.prompts twice: every line is drawn with a seed of its own",
         at=(_METRICS,)),
    Rule((_EARLY, _METRICS, "validation.held_out", "validation.img_dir"), _unmeasured,
         "`validation.early_stop` watches {monitor}, and {why}", "{remedy}, or leave early_stop out",
         at=(_EARLY,)),
)  # fmt: skip
