"""The plan's row on `validation.metrics`: the models that measure previews, and the memory that they take."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from trainer.config.reading.load import Loaded
from trainer.files.weight_files import read_header, weight_files
from trainer.modeling.base import hub
from trainer.planning.plan import Decision, MemoryRow, Plan
from trainer.words.sizes import gib

_FLOAT32_BYTES = 4


def with_scoring(plan: Plan, loaded: Loaded) -> Plan:
    """The plan with a row on the metrics of previews, and one of host memory where the models are here.

    Raises AccessError for weight files that cannot be read.
    """
    validation = loaded.config.validation
    names = [validation.clip_model] if "clip_t" in validation.metrics else []
    names += [validation.dinov2_model] if set(validation.metrics) - {"clip_t"} else []
    if not names:
        return plan
    sizes = [_float32_bytes(name) for name in names]
    known = [size for size in sizes if size is not None]
    reason = (
        f"{' and '.join(names)}, loaded after each round of previews on the CPU in float32, one at a time,"
    )
    reason += " and freed: memory of the host"
    if len(known) < len(names):
        reason += "; sizes are known once they are on this disk"
    source, value = loaded.sources["validation.metrics"], ", ".join(validation.metrics)
    row = Decision("metrics", value, source, reason)
    plan = dataclasses.replace(plan, decisions=(*plan.decisions, row))
    if not known:
        return plan
    memory = MemoryRow("scoring", max(known), "weights of the larger model, while previews are measured")
    needed = sum(one.bytes for one in plan.train_memory) + memory.bytes
    plan = dataclasses.replace(plan, host_memory=(*plan.host_memory, memory))
    if plan.device != "cpu" or needed <= plan.budget_bytes:
        return plan
    what = (
        f"measuring previews takes {gib(memory.bytes)} beside what training holds: {gib(needed)} at most,"
        f" of a budget of {gib(plan.budget_bytes)}"
    )
    return dataclasses.replace(plan, warnings=(*plan.warnings, what))


def _float32_bytes(name: str) -> int | None:
    """Bytes of a model's weights in float32; None where it is not on this disk."""
    folder = Path(name) if Path(name).is_dir() else None
    if folder is None and hub.is_repository_id(name):
        folder = hub.cached(name, None)
    files = () if folder is None else weight_files(folder).files
    shapes = [shape for file in files for shape in read_header(file).shapes.values()]
    return _FLOAT32_BYTES * sum(math.prod(shape) for shape in shapes) if shapes else None
