"""The differences of two plans and of two configurations, in a sentence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from trainer.engine.comparing.variants import SEED, Variant, settings
from trainer.planning.plan import Plan, on_off

_NOT_CHOSEN = frozenset(
    {
        "decisions", "warnings", "train_memory", "cache_memory", "host_memory", "step_milliseconds",
        "optimizer_milliseconds", "peak_tflops", "budget_bytes", "disk_bytes", "keep_bytes", "environment",
        "rank_environment", "unset", "activation_checkpointing", "recomputed_blocks", "loader",
    }
)  # fmt: skip
"""Fields of a plan that predict, explain, follow from others or are about the start alone; recomputed blocks
have words of their own."""
_FOLLOWS = {"weight_gradient": "compute", "weight_copies": "compute", "modulation": "weights"}
"""Fields that have another word, or none, where the field behind them has another value."""
_RECOMPUTED = "recomputed blocks"


def choices(plan: Plan) -> dict[str, str]:
    """The choices of a plan by name, as words."""
    found = {
        field.name: _word(vars(plan)[field.name])
        for field in dataclasses.fields(plan)
        if field.name not in _NOT_CHOSEN
    }
    blocks = str(plan.recomputed_blocks or "all") if plan.activation_checkpointing else "none"
    return {**found, _RECOMPUTED: blocks}


def unequal(ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Keys of which two mappings have unequal values, with both; `-` where one has none."""
    keys = dict.fromkeys([*ours, *theirs])
    pairs = {key: (ours.get(key, "-"), theirs.get(key, "-")) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def sentences(variants: Sequence[Variant]) -> list[str]:
    """Sentences on what differs between the first variant and each other one, the plans first."""
    first, *others = variants
    return [line for other in others for line in _between(first, other)]


def _between(first: Variant, other: Variant) -> list[str]:
    who = f"{first.letter} and {other.letter}"
    found = unequal(choices(first.plan), choices(other.plan))
    following = {name for name in found if _FOLLOWS.get(name) in found}
    causes = [name for name in found if name not in following]
    if not found:
        lines = [f"{who}: the plans are equal"]
    else:
        texts = [f"{name} ({', '.join(found[name])})" for name in causes]
        more = f", with {_listed(sorted(following))}" if following else ""
        lines = [f"{who}: the plans differ in {_listed(texts)}{more}"]
    if len(causes) > 1:
        lines.append(f"  a ratio is that of all of these together, and not {causes[0]}'s alone")
    # keys without effect in one of them follow from what is said already
    ours, theirs = settings(first.config), settings(other.config)
    written = {key: pair for key, pair in unequal(ours, theirs).items() if key in ours.keys() & theirs.keys()}
    if not other.own_seed:
        written.pop(SEED, None)
    if written:
        pairs = [f"{key} ({', '.join(pair)})" for key, pair in written.items()]
        lines.append(f"  the configurations differ in {_listed(pairs)}")
    return lines


def planned_otherwise(variant: Variant, ran: Plan) -> str:
    """How a run's own plan differs from that of its variant; empty where it does not."""
    found = unequal(choices(variant.plan), choices(ran))
    texts = [f"{name} {there}, not {here}" for name, (here, there) in found.items()]
    return f"planned otherwise than said above: {', '.join(texts)}" if texts else ""


def _listed(texts: Sequence[str]) -> str:
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def _word(value: object) -> str:
    if isinstance(value, bool):
        return on_off(value)
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return str(value) if value != "" else "none"
