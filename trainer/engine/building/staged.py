"""Repeated blocks whose frozen weights lie elsewhere: in host memory, or with the other GPUs of the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.engine.building.model import Model
from trainer.engine.context import Context
from trainer.modeling.blocks.recompute import Blocks
from trainer.modeling.storage.host_blocks import HostMemory, spread_blocks
from trainer.modeling.storage.peer_blocks import PeerMemory
from trainer.modeling.storage.staging import Staged
from trainer.planning.plan import Plan
from trainer.words.sizes import gib


def devices(context: Context, blocks: Blocks) -> dict[str, str]:
    """Devices of the blocks that are not loaded to this one, by name: meta, where another rank loads them."""
    plan = context.plan
    names = _elsewhere(plan, blocks)
    if plan.swapped_blocks:
        return dict.fromkeys(names, "cpu")
    member = context.ranks.rank % plan.shard_group
    return {name: "meta" for number, name in enumerate(names) if number % plan.shard_group != member}


def with_staged_blocks(context: Context, model: Model) -> Model:
    """The model with these blocks where they are to lie; all ranks call it together."""
    plan = context.plan
    assert not plan.cuda_graphs, "a graph finds the weights where they were when it was captured"
    blocks = [model.blocks[name] for name in _elsewhere(plan, model.blocks)]
    if plan.swapped_blocks:
        staged = Staged(HostMemory(blocks, pinned=plan.device == "cuda"), context.device)
        where = f"wait in host memory ({gib(staged.home_bytes)})"
    else:
        home = _peers(context, blocks)
        staged = Staged(home, context.device)
        where = f"lie with {plan.shard_group} ranks in turn ({gib(home.own_bytes)} with this one)"
    context.say(f"{len(blocks)} blocks {where} and pass through {gib(staged.device_bytes)} of the device's")
    return replace(model, staged=staged)


def _peers(context: Context, blocks: list[Any]) -> PeerMemory:
    ranks, size = context.ranks, context.plan.shard_group
    member = ranks.rank % size
    first = ranks.rank - member

    def gather(value: Any) -> list[Any]:
        return ranks.gathered(value)[first : first + size]

    return PeerMemory(blocks, member=member, size=size, gather=gather, device=context.device)


def _elsewhere(plan: Plan, blocks: Blocks) -> list[str]:
    """Names of the blocks that are to lie elsewhere than on this device."""
    return spread_blocks(blocks, plan.swapped_blocks or plan.sharded_blocks)
