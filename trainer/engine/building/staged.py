"""Repeated blocks whose frozen weights lie elsewhere: in host memory, or with the other GPUs of the run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from trainer.engine.building.model import Model
from trainer.engine.context import Context, limit_memory
from trainer.modeling.adapter.lora import linear_names
from trainer.modeling.adapter.targets import target_pattern
from trainer.modeling.base.load import Readers
from trainer.modeling.blocks.recompute import Blocks, repeated_blocks
from trainer.modeling.storage.host_blocks import HostMemory, spread_blocks
from trainer.modeling.storage.peer_blocks import PeerMemory
from trainer.modeling.storage.shared_memory import held_bytes, peak_bytes
from trainer.modeling.storage.staging import Home, Staged
from trainer.planning.plan import Plan
from trainer.words.sizes import gib


def devices(context: Context, blocks: Blocks) -> dict[str, str]:
    """Devices of the blocks that are not loaded to this one, by name: meta, where another rank loads them."""
    plan, (member, size) = context.plan, _place(context)
    names = _elsewhere(plan, blocks)
    others = {name: "meta" for number, name in enumerate(names) if number % size != member}
    return {**(dict.fromkeys(names, "cpu") if plan.swapped_blocks else {}), **others}


def absent(context: Context, module: torch.nn.Module) -> set[str]:
    """Names of the modules that another rank loads."""
    found = devices(context, repeated_blocks(module, context.family.blocks))
    blocks = [name for name, device in found.items() if device == "meta"]
    return {
        f"{name}.{inner}".removesuffix(".")
        for name in blocks
        for inner, _ in module.get_submodule(name).named_modules()
    }


def file_readers(context: Context, blocks: Blocks) -> Readers:
    """The ranks of this host: each reads its share of what all have, and its own blocks for itself."""
    ranks, parted = context.ranks, _elsewhere(context.plan, blocks)
    return Readers(member=ranks.local_rank, size=ranks.ranks_here, send=ranks.send, parted=frozenset(parted))


def with_staged_blocks(context: Context, model: Model) -> Model:
    """The model with these blocks where they are to lie; all ranks call it together."""
    plan, device, (_, size) = context.plan, context.device, _place(context)
    blocks = [model.blocks[name] for name in _elsewhere(plan, model.blocks)]
    if plan.swapped_blocks:
        home: Home
        if size == 1:
            pinned = plan.device == "cuda"
            home = HostMemory(blocks, pinned=pinned, forward_only=_forward_only(context, model))
        else:
            home = _peers(context, model, blocks, on_host=True)
        staged = Staged(home, device, closed=plan.cuda_graphs)
        once = f", one copy for {size} ranks" if size > 1 else ""
        where = f"wait in host memory ({gib(staged.home_bytes)}{once})"
    else:
        peers = _peers(context, model, blocks)
        staged = Staged(peers, device, closed=plan.cuda_graphs)
        if plan.device == "cuda":
            # the blocks of this rank were torch's while they were loaded, and are counted apart now
            loading = torch.cuda.max_memory_reserved()
            torch.cuda.reset_peak_memory_stats()
            context.status.device_memory = functools.partial(peak_bytes, loading)
            limit_memory(context, held_bytes())
        where = f"lie with {size} ranks in turn ({gib(peers.own_bytes)} with this one)"
    if staged.closed:
        model.module.register_forward_pre_hook(lambda *_: staged.begin())
    context.say(f"{len(blocks)} blocks {where} and pass through {gib(staged.device_bytes)} of the device's")
    return replace(model, staged=staged)


def _place(context: Context) -> tuple[int, int]:
    """The place of this rank among those that share blocks, and their number; all of a host share its
    memory.
    """
    plan, ranks = context.plan, context.ranks
    size = ranks.ranks_here if plan.swapped_blocks else plan.shard_group
    return ranks.rank % size, size


def _peers(context: Context, model: Model, blocks: list[Any], *, on_host: bool = False) -> PeerMemory:
    member, size = _place(context)
    first = context.ranks.rank - member

    def agree(make: Callable[[], Any]) -> list[Any]:
        return context.ranks.agreed(make)[first : first + size]

    return PeerMemory(
        blocks,
        member=member,
        size=size,
        agree=agree,
        device=context.device,
        on_host=on_host,
        forward_only=_forward_only(context, model),
    )


def _forward_only(context: Context, model: Model) -> list[Any] | None:
    """The blocks' modules whose weights no backward pass reads; None where one repeats something of forward.

    Modulation reads what the noise level and the caption were embedded to, in which nothing is trained unless
    the adapter has layers outside of the blocks.
    """
    plan, family = context.plan, context.family
    if plan.activation_checkpointing or plan.activation_budget < 1.0:
        return None
    inside, names = tuple(f"{name}." for name in model.blocks), linear_names(model.module)
    targets = re.compile(target_pattern(context.config.lora, family.lora_targets, names))
    if any(targets.fullmatch(name) and not name.startswith(inside) for name in names):
        return []
    taken = re.compile("|".join(family.modulation) or "(?!)")
    found = model.module.named_modules()
    return [module for name, module in found if name.startswith(inside) and taken.fullmatch(name)]


def _elsewhere(plan: Plan, blocks: Blocks) -> list[str]:
    """Names of the blocks that are to lie elsewhere than on this device."""
    return spread_blocks(blocks, plan.swapped_blocks or plan.sharded_blocks)
