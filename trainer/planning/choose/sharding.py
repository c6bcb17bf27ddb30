"""Blocks of a frozen base that lie with several GPUs in turn, which read each other's memory."""

from __future__ import annotations

from trainer.planning.choose.situation import Situation
from trainer.planning.cost.memory import Storage
from trainer.planning.plan import Decision
from trainer.planning.shapes.adapters import needs_whole_base

KEY = "parallel.shard"


def written(situation: Situation) -> int:
    """Number of blocks that are to lie so as the user wrote it; 0 where the plan may decide."""
    asked = situation.config.parallel.shard == "full" and situation.ranks > 1
    return situation.geometry.blocks if asked else 0


def refused(situation: Situation) -> str:
    """Why the base cannot be shared as it was written; empty where it can."""
    return obstacle(situation) if situation.config.parallel.shard == "full" else ""


def obstacle(situation: Situation) -> str:
    """Why no block can lie with another GPU; empty where they can."""
    if needs_whole_base(situation.config):
        return f"lora.type: {situation.config.lora.type} is made from the weights of all blocks"
    return ""


def row(situation: Situation, storage: Storage) -> Decision | None:
    """The decision, for a run of several processes over a frozen base."""
    if situation.ranks == 1 or storage.method != "lora":
        return None
    if not storage.sharded:
        return situation.decide(KEY, "none", "each has the whole base, which is the fastest and fits")
    value = f"{storage.sharded} of {situation.geometry.blocks} blocks over {storage.group}"
    return situation.decide(KEY, value, "nothing faster fits: blocks are read from the GPU that has them")
