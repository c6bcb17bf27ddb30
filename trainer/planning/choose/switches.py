"""Features that are on or off: TF32, compiled blocks, CUDA graphs, captions and rows padded to lengths."""

from __future__ import annotations

from trainer.planning.choose import batching
from trainer.planning.choose.situation import Situation
from trainer.planning.cost.storage import Storage
from trainer.planning.plan import Decision, on_off
from trainer.planning.shapes.adapters import plain_path
from trainer.planning.shapes.mix import padded_row
from trainer.ways.kernels import KERNELS
from trainer.ways.storages import Way

COMPILE_SECONDS = 45
"""Seconds that compiling a model's blocks costs, about: a run that gains less stays eager.

On an H200 the first steps of two models took 38 s, and the next ones, until graphs served them, 5 to 12 s
more than later ones.
"""
TIGHT = 0.96
"""Share of an imposed budget beyond which memory between tensors decides whether a run fits."""
_MOST_MASKED = 8192
"""Tokens of a row for which a CPU makes a mask of tokens x tokens: 5 bytes each, in a block."""
COMPILE, SHARE = "features.compile", "features.activation_budget"
_NEEDS_COMPILED = "only with compiled blocks"


def tf32(situation: Situation) -> Decision:
    """Decision on TF32 for the products that stay in float32."""
    value = situation.tensor_cores and situation.config.features.tf32 is not False
    reason = "for what stays in float32" if value else no_tf32(situation)
    return situation.decide("features.tf32", on_off(value), reason)


def no_tf32(situation: Situation) -> str:
    """Why the device computes nothing in TF32; empty where it can."""
    return "" if situation.tensor_cores else f"{situation.gpu} has no TF32"


def compiling(situation: Situation, gain_milliseconds: float, *, known: bool) -> Decision:
    """Decision on compiling blocks, by the predicted gain of a micro-batch, if the GPU's rates are `known`;
    each GPU makes its share of them. `auto` never does on a CPU.
    """
    features = situation.config.features
    if features.compile != "auto" or compile_key(situation):
        return situation.decide(COMPILE, on_off(features.compile is not False), f"{SHARE} needs it")
    if not situation.on_gpu and not plain_path(situation.config):
        return situation.decide(COMPILE, "off", "for GPUs; true compiles here too")
    obstacle = compile_obstacle(situation)
    if obstacle:
        return situation.decide(COMPILE, "off", obstacle)
    number, ranks = batching.micro_batches(situation.config), situation.ranks
    seconds = gain_milliseconds * number / ranks / 1000
    how = "predicted" if known else "guessed: this GPU's rates are not known"
    what = "micro-batches" if situation.config.train.train_batch_size == 1 else "batches"
    shared = f" on {ranks} GPUs" if ranks > 1 else ""
    gain = f"{_whole(number)} {what}{shared} would gain {_whole(seconds)} s ({how})"
    reason = f"{gain}, compiling costs about {COMPILE_SECONDS} s"
    return situation.decide(COMPILE, on_off(seconds >= COMPILE_SECONDS), reason)


def compile_key(situation: Situation) -> str:
    """The key by which the user asked for compiled blocks; empty where none does."""
    features = situation.config.features
    if features.compile is True:
        return COMPILE
    return SHARE if features.compile == "auto" and features.activation_budget not in ("auto", 1.0) else ""


def compile_obstacle(situation: Situation) -> str:
    """Why blocks are not compiled here; empty where they can be."""
    option = plain_path(situation.config)
    if option:
        compiled = "compiled blocks are for plain LoRA and full fine-tunes in bf16 and fp32"
        return f"{option} keeps to the plain path: {compiled}"
    if situation.on_gpu and "triton" not in situation.facts.packages:
        return "it needs triton, which is not installed"
    return "" if situation.facts.c_compiler else "it needs a C compiler (gcc or clang), and there is none"


def cuda_graphs(situation: Situation, storage: Storage, *, filled: float) -> Decision:
    """Decision on replaying a micro-batch as one CUDA graph; raises HardwareError if asked for in vain.

    `filled` is the share of an imposed budget that training is predicted to fill, 0 without one.
    """
    key, obstacle = "features.cuda_graphs", "" if storage.compile else _NEEDS_COMPILED
    if not situation.on_gpu:
        obstacle = "a CPU has no CUDA graphs"
    elif situation.geometry.packed:
        obstacle = "a graph is of one shape, and packed rows differ in how many of their tokens are learned"
    elif storage.method != "lora" or storage.dtype != "bf16":
        obstacle = "only for a LoRA in bf16, whose gradients are summed inside the graph"
    elif storage.compile and storage.swapped and situation.asked(key) == "auto":
        obstacle = "memory is short where blocks wait in host memory, and what graphs hold is not given back"
    elif storage.compile and filled > TIGHT and situation.asked(key) == "auto":
        full = f"{filled:.0%} of the budget is filled"
        obstacle = f"{full}, and what graphs hold cannot be given back in pieces"
    reason = "thousands of launches become one: the host's speed does not matter"
    return _switch(situation, key, obstacle, reason, storage.way)


def text_padding(situation: Situation, storage: Storage) -> Decision:
    """Decision on padding captions to a few lengths, and packed rows to one; raises HardwareError if asked
    for in vain.
    """
    if situation.geometry.packed:
        return _row_padding(situation, storage)
    key, obstacle = "features.text_padding", "" if storage.compile else _NEEDS_COMPILED
    if not situation.geometry.captions_vary:
        obstacle = "this family's captions are not of different lengths"
    elif KERNELS[storage.attention].exact_only:
        obstacle = f"padding cannot be left out of {storage.attention}"
    elif storage.method != "lora":
        obstacle = "only beside a frozen base"
    elif obstacle and situation.asked(key) == "auto":
        obstacle = "blocks that are not compiled take every length as it comes"
    reason = "captions become 64, 128, 256, 384, 512 ... tokens long, which attention leaves out"
    return _switch(situation, key, obstacle, reason, storage.way)


def _row_padding(situation: Situation, storage: Storage) -> Decision:
    """`text_padding` of a family whose samples are packed into rows."""
    key, obstacle, config = "features.text_padding", "", situation.config
    tokens = config.train.train_batch_size * padded_row(config.data.max_sequence_length)
    if not storage.compile:
        as_it_comes = "blocks that are not compiled take every row as it comes"
        obstacle = as_it_comes if situation.asked(key) == "auto" else _NEEDS_COMPILED
    elif situation.on_gpu and not KERNELS[storage.attention].reads_ends:
        obstacle = f"{storage.attention} takes a row conversation by conversation"
    elif situation.on_gpu and situation.asked(key) == "auto":
        obstacle = "an H200 is no faster with it (within 1%); true pads rows here too"
    elif not situation.on_gpu and tokens > _MOST_MASKED:
        obstacle = f"a CPU would need masks of {tokens} x {tokens} tokens"
    reason = (
        f"row padded to {tokens} tokens (one graph for all packings); usually 1 to 8% of it is padding, the"
        " log tells this set's share"
    )
    return _switch(situation, key, obstacle, reason, storage.way)


def _switch(situation: Situation, key: str, obstacle: str, reason: str, way: Way) -> Decision:
    """`on` or `off` as written, and by itself on where there is no obstacle."""
    asked = situation.asked(key)
    if asked is True and obstacle:
        instead = ""
        if obstacle == _NEEDS_COMPILED:
            cannot = compile_obstacle(situation)
            if not cannot and situation.on_gpu and situation.facts.gpu.capability < way.least_compiled:
                cannot = f"blocks with {way.weights} weights cannot be compiled on {situation.gpu}"
            obstacle = f"{obstacle}: {cannot}" if cannot else obstacle
            instead = "" if cannot else ", or write features.compile: true"
        raise situation.refuse(key, obstacle, f"leave {key} out{instead}")
    return situation.decide(key, on_off(not obstacle if asked == "auto" else asked), obstacle or reason)


def _whole(number: float) -> str:
    return f"{number:,.0f}".replace(",", " ")
