"""Speed of a built model: layers that compute together, and compiled blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.engine.building.model import Model
from trainer.engine.caching.batches import synthetic
from trainer.engine.context import Context
from trainer.families.values import Batch, Draw, Shape
from trainer.modeling.blocks.compiled import compile_blocks, eager, varying_sizes
from trainer.modeling.blocks.same_input import same_inputs
from trainer.modeling.storage.joined_trained import Joined, join_trained
from trainer.words.plurals import numbered

# a small input: which layers share theirs, and which kernels run, does not depend on its size
_SIDE, _TOKENS = 256, 64


@dataclass(frozen=True, kw_only=True)
class Fused:
    """Numbers of layers that compute together."""

    joined: int
    norms: int
    rotations: int
    activations: int

    def __str__(self) -> str:
        return (
            f"{self.joined} LoRA layers share a product with their siblings, {self.norms} norms take one"
            f" pass, those of {self.rotations} attentions together with the rotation,"
            f" {self.activations} activations are computed while quantising"
        )


def fuse(model: Any, run: Callable[[], None]) -> Fused:
    """Let layers of a model with a LoRA over a frozen base compute together; `run` predicts once with it."""
    from trainer.modeling.adapter.joined_lora import join_siblings
    from trainer.modeling.fused.feedforward import fuse_feed_forwards
    from trainer.modeling.fused.norms import fuse_head_norms
    from trainer.modeling.fused.rotary import fuse_rotary

    return Fused(
        norms=fuse_head_norms(model),
        rotations=fuse_rotary(model),
        activations=fuse_feed_forwards(model),
        joined=join_siblings(model, run),
    )


def linears_of_one_input(context: Context, model: Model) -> list[list[str]]:
    """Names of a full fine-tune's linears by the input that they are given; none where they stay separate.

    They do in fp32, which is not what fast runs are in, and where weights lie in rows over several GPUs: each
    layer's rows are gathered for themselves.
    """
    if context.plan.dtype != "bf16" or model.root is not None:
        return []
    return same_inputs(model.module, small_forward(context, model.module), (torch.nn.Linear,))


def join_linears(context: Context, model: Model, names: list[list[str]]) -> Joined:
    """Join those of `linears_of_one_input` that are alike, and give back the memory that they had."""
    joined = join_trained(model.module, names, model.blocks)
    if context.device != "cpu":
        torch.cuda.empty_cache()
    return joined


def _fuse_and_compact(context: Context, model: Model) -> Fused:
    """`fuse`, then give back the holes that separate weights left where they were joined.

    Weights of blocks that lie elsewhere are joined there.
    """
    from trainer.modeling.storage.block_memory import compact

    staged, predict = model.staged, small_forward(context, model.module)

    def run() -> None:
        predict()
        if staged is not None:
            staged.unpack()

    fused = fuse(model.module, run)
    if staged is not None:
        staged.pack()
    if context.device == "cpu":
        return fused
    placed = () if staged is None else (*staged.blocks, *staged.home.kept)
    for block in model.blocks.values():
        if block not in placed:
            compact([block])
            # each time: without expandable segments no block takes the place of another
            torch.cuda.empty_cache()
    return fused


def compile_model(context: Context, model: Model, varies: Sequence[str]) -> None:
    """Fuse layers that can compute together; the repeated blocks compile at their first call.

    For any of the sizes that vary (arguments of `small_forward`) at once: of one size first, they would be
    compiled three times.
    """
    move_plain_tensors(model.module, context.device)
    fused = f"; {_fuse_and_compact(context, model)}" if context.config.method == "lora" else ""
    sizes: list[dict[str, int]] = [{}, *({one: 2} for one in varies)]
    runs = [small_forward(context, model.module, **size) for size in sizes]
    varying = varying_sizes(model.blocks, runs) if len(runs) > 1 else {}
    budget = context.plan.activation_budget
    count = compile_blocks(
        model.blocks,
        activation_budget=budget,
        varying=varying,
        in_rows=model.root is not None,
        say=context.say,
    )
    context.say(
        f"{numbered(count, 'block is', 'blocks are')} compiled at the first step (under a minute, seconds"
        f" where the cache is warm){fused}"
    )


def move_plain_tensors(model: Any, device: str) -> None:
    """Move tensors that modules keep as plain attributes, which `Module.to` leaves where they were made.

    Copying them from the host in every step would wait, and cannot be part of a CUDA graph.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                setattr(module, name, value.to(device))


def small_forward(
    context: Context, model: Any, *, wide: int = 1, tall: int = 1, text: int = 1, batch: int = 1
) -> Callable[[], None]:
    """A function that predicts once for a small synthetic batch, without gradients.

    Its pictures are so many times as wide and tall as the smallest, its captions as long.
    """
    family = context.family
    made, draw = small_batch(context, wide=wide, tall=tall, text=text, batch=batch)

    def run() -> None:
        with torch.no_grad():
            family.predict(model, made, draw, context.settings)

    return run


def small_batch(
    context: Context, *, wide: int = 1, tall: int = 1, text: int = 1, batch: int = 1
) -> tuple[Batch, Draw | None]:
    """A small synthetic batch and its draw, on the device; see `small_forward`."""
    family = context.family
    side = _SIDE // family.pixel_multiple * family.pixel_multiple
    shape = Shape(
        batch_size=batch,
        width=wide * side,
        height=tall * side,
        text_tokens=text * min(_TOKENS, context.config.data.max_sequence_length),
        bytes_per_value=2,
        controls=family.control_counts[0],
    )
    return synthetic(context, shape, seed=0, position=0)


def uncompiled(context: Context) -> contextlib.AbstractContextManager[None]:
    """Context for previews, validation and proof: compiled blocks run eagerly, without more graphs."""
    return eager() if context.plan.compile else contextlib.nullcontext()
