"""Blocks whose frozen weights lie elsewhere than on their device, only where nothing else fits, and how many.

They wait in host memory, or lie with several GPUs in turn, which read each other's memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from trainer.config.schema import RunConfig, changed
from trainer.errors import ConfigError
from trainer.planning.choose.situation import Situation
from trainer.planning.cost import memory
from trainer.planning.cost.storage import Storage
from trainer.planning.plan import Decision
from trainer.planning.shapes.adapters import needs_whole_base, plain_path
from trainer.planning.shapes.geometry import Geometry
from trainer.words.sizes import gib

SWAP, SHARD = "features.block_swap", "parallel.shard"
NO_PEER_ACCESS = "GeForce"
"""Part of the names of GPUs that cannot read each other's memory."""
NO_OFFLOAD = "DISABLE_CPU_OFFLOAD"
"""The variable that forbids blocks in host memory."""


def swapped(config: RunConfig) -> int:
    """Number of waiting blocks that the user asked for; 0 where the plan may decide."""
    asked = config.features.block_swap
    return 0 if asked == "auto" else asked


def without(situation: Situation) -> Situation:
    """The situation where no block may wait. Raises ConfigError where the user wrote a number of blocks."""
    count = swapped(situation.config)
    if count:
        raise ConfigError(
            f"{SWAP} is {count}, but {NO_OFFLOAD} is true",
            where=situation.source(SWAP),
            remedy="leave one of them out",
        )
    if situation.config.features.block_swap != "auto":
        return situation
    sources = {**situation.sources, SWAP: f"{NO_OFFLOAD}=true"}
    return dataclasses.replace(situation, config=changed(situation.config, {SWAP: 0}), sources=sources)


def swap_refused(situation: Situation) -> str:
    """Why the number of blocks that was written cannot wait; empty where it can."""
    count, blocks = swapped(situation.config), sum(stack.blocks for stack in situation.geometry.stacks)
    what = swap_obstacle(situation) if count else ""
    if not what and count > blocks:
        return f"{count} blocks are to wait in host memory, the model has {blocks}"
    return what


def swap_obstacle(situation: Situation) -> str:
    """Why no block can wait in host memory; empty where they can."""
    if not situation.on_gpu:
        return "training on a CPU has all weights in host memory"
    if sharded(situation):
        return "the blocks lie with the GPUs of the run (parallel.shard)"
    if situation.profile.headroom_bytes is not None or situation.facts.gpu.integrated:
        moves = f"{situation.gpu} shares its memory with the CPU: moving weights frees nothing"
        return dict(situation.profile.notes).get("offload", moves)
    if situation.config.method != "lora":
        return "weights that are trained cannot wait in host memory: it is for method: lora"
    option = plain_path(situation.config)
    if option:
        return f"{option} keeps to the plain path, where no block waits"
    return ""


def fewest(storage: Storage, geometry: Geometry, budget_bytes: int) -> Storage:
    """`storage` with as few waiting blocks as fit the budget in training, or with all where none do."""
    swapped = storage
    for count in range(1, sum(stack.blocks for stack in geometry.stacks) + 1):
        swapped = dataclasses.replace(storage, swapped=count)
        if memory.total(memory.train_rows(swapped, geometry)) <= budget_bytes:
            break
    return swapped


def no_room(situation: Situation, storage: Storage) -> str:
    """Why host memory does not take the blocks that wait; empty where it does."""
    needed = memory.total(memory.host_rows(storage, situation.geometry))
    available = situation.facts.memory.available_bytes
    if not storage.swapped or needed <= available:
        return ""
    waiting = f"{storage.swapped} of {situation.geometry.blocks} blocks waiting in host memory"
    who = f"the {storage.ranks_here} processes need" if storage.ranks_here > 1 else "the process needs"
    return f"with {waiting} {who} {gib(needed)} of it, and {gib(available)} are available"


def swap_rows(situation: Situation, storage: Storage, without_bytes: int) -> Iterator[Decision]:
    """The decision, where blocks wait or the user wrote a number; else training needs `without_bytes`."""
    asked = situation.config.features.block_swap
    if asked != "auto" or storage.swapped:
        least = f"nothing smaller fits: without it training needs {gib(without_bytes)}"
        reason = f"{least}; {storage.swapped} of {situation.geometry.blocks} blocks wait in host memory"
        as_written = "as written" if asked else "as written: no weights wait in host memory"
        yield situation.decide(SWAP, str(storage.swapped or asked), reason, written=as_written)


def sharded(situation: Situation) -> int:
    """Number of blocks that are to lie so as the user wrote it; 0 where the plan may decide."""
    config = situation.config
    asked = config.parallel.shard == "full" and config.method == "lora" and situation.ranks_here > 1
    return situation.geometry.blocks if asked else 0


def shard_refused(situation: Situation) -> str:
    """Why the base cannot be shared as it was written; empty where it can."""
    config = situation.config
    return shard_obstacle(situation) if config.parallel.shard == "full" and config.method == "lora" else ""


def shard_obstacle(situation: Situation) -> str:
    """Why no block can lie with another GPU; empty where they can."""
    if situation.on_gpu and NO_PEER_ACCESS in situation.facts.gpu.name:
        return f"GPUs of this kind ({situation.facts.gpu.name}) cannot read each other's memory"
    if needs_whole_base(situation.config):
        return f"lora.type: {situation.config.lora.type} is made from the weights of all blocks"
    return ""


def shared(situation: Situation, settings: Iterable[Storage], budget_bytes: int) -> Iterator[Storage]:
    """Settings that do not fit with a whole base on each GPU, with as few shared blocks as fit the budget in
    training, or with all in the largest group where none does; none where nothing may be shared by itself.
    """
    config = situation.config
    if config.method != "lora" or config.parallel.shard != "auto" or unshared(situation):
        return
    tiled = situation.config.features.vae_tiling is not False
    groups = [size for size in range(2, situation.ranks_here + 1) if situation.ranks_here % size == 0]
    for storage in settings:
        if storage.swapped or _trains_in(storage, situation.geometry, tiled=tiled) <= budget_bytes:
            continue
        found = storage
        for group in groups:
            found = dataclasses.replace(storage, sharded=situation.geometry.blocks, group=group)
            if _trains_in(found, situation.geometry, tiled=tiled) <= budget_bytes:
                found = _fewest_shared(found, situation.geometry, budget_bytes, tiled=tiled)
                break
        yield found


def _fewest_shared(storage: Storage, geometry: Geometry, budget_bytes: int, *, tiled: bool) -> Storage:
    """The setting with the fewest shared blocks that fit, of which it is known that all of them do.

    Each is tried: a block more may need more memory, for the pages that it passes through, and since the GPU
    counts that has most of them.
    """
    trials = (dataclasses.replace(storage, sharded=count) for count in range(1, storage.sharded))
    fitting = (one for one in trials if _trains_in(one, geometry, tiled=tiled) <= budget_bytes)
    return next(fitting, storage)


def _trains_in(storage: Storage, geometry: Geometry, *, tiled: bool) -> int:
    return memory.total(memory.train_rows(dataclasses.replace(storage, tiling=tiled), geometry))


def unshared(situation: Situation) -> str:
    """Why `auto` shares no block between GPUs; empty where it may."""
    link = situation.facts.link
    if situation.ranks_here == 1 or not situation.on_gpu:
        return "there is one GPU" if situation.on_gpu else "processes on a CPU share its memory"
    if swapped(situation.config):
        return f"{SWAP} says where blocks lie"
    if obstacle := shard_obstacle(situation):
        return obstacle
    if link is None:
        used = ", as other programs work on them" if any(gpu.in_use for gpu in situation.facts.gpus) else ""
        return f"the way between these GPUs was not measured{used} (`trainer probe CONFIG`)"
    return "" if link.works else f"the probe saw it failing: {link.reason}"


def shard_row(situation: Situation, storage: Storage, whole_bytes: int, instead: str) -> Decision | None:
    """The decision, for a run of several processes, over a frozen base that whole on each GPU would need
    `whole_bytes` where that was tried; `instead` says what would fit then.
    """
    if storage.in_rows:
        rows = "each holds its rows of weights, gradients and moments; blocks are gathered to compute (FSDP2)"
        return situation.decide(SHARD, f"rows over {storage.ranks}", rows, written=f"as written: {rows}")
    if situation.ranks_here == 1:
        alone = "one process has nothing to share with"
        asked = situation.asked(SHARD) == "full"
        return situation.decide(SHARD, "none", alone, written=f"{alone}: as none") if asked else None
    if not storage.sharded:
        why = unshared(situation)
        return situation.decide(
            SHARD, "none", f"each has a whole base{f': {why}' if why else ', and it fits'}"
        )
    value = f"{storage.sharded} of {situation.geometry.blocks} blocks over {storage.group}"
    link = situation.facts.link
    parts = [
        f"whole on each GPU it needs {gib(whole_bytes)}" if whole_bytes else "",
        f"read from the GPU that has them, at {link.gib_per_second:.0f} GiB/s as measured" if link else "",
        instead,
    ]
    return situation.decide(SHARD, value, "; ".join(filter(None, parts)))
