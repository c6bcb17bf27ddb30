"""Building a model that can train from files, in the one order that is right.

`load_base`: build on the meta device -> replace linear layers -> stream shards (read, quantise, place; blocks
that lie elsewhere go there) -> attention kernel. `build`: LoRA, or FP8 and joined layers of trained weights
-> activation checkpointing -> a LoRA's joined layers -> compile -> optimizer. A resume comes after all of it,
in `training.state`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

from trainer.engine.building.fast import compile_model, join_linears, linears_of_one_input
from trainer.engine.building.fp8 import prove_fp8, rows_in_fp8, train_in_fp8
from trainer.engine.building.model import Model
from trainer.engine.building.staged import absent, devices, file_readers, with_staged_blocks
from trainer.engine.context import Context
from trainer.engine.optimizing.updater import Updater
from trainer.files.safetensors import read_header
from trainer.modeling.adapter import lora
from trainer.modeling.adapter.start_from import saved_start, start_from
from trainer.modeling.adapter.targets import target_pattern
from trainer.modeling.attention.setting import set_attention
from trainer.modeling.attention.text_lengths import TextReader
from trainer.modeling.base.load import build_structure, fill_structure
from trainer.modeling.base.structure import built_empty
from trainer.modeling.blocks.recompute import has_dropout, recompute_blocks, repeated_blocks
from trainer.modeling.blocks.sample_linear import multiply_few_rows
from trainer.modeling.storage.joined_trained import follow_weights
from trainer.modeling.storage.layers import any_of, count_quantized, replacer
from trainer.modeling.storage.staging import Staged
from trainer.telemetry.progress import progress
from trainer.telemetry.status import Phase
from trainer.words.plurals import numbered


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model ready to train."""

    model: Any
    updater: Updater
    accelerator: Accelerator
    staged: Staged | None = None
    """The blocks whose weights lie elsewhere; None where all are on the device."""
    text_readers: tuple[TextReader, ...] = ()
    """Attention processors that leave the padding of captions out; none where captions are not padded."""
    context: Context
    """The run's context; of weights in rows its family passes through the model by all ranks together."""


def build(context: Context, varies: Sequence[str] = ()) -> Built:
    """Load the base, make it trainable by the configured method, and attach the optimizer.

    Compiled blocks serve any of the sizes that vary (arguments of `small_forward`), and of others the first
    one until another comes.
    """
    plan = context.plan
    model = load_base(context)
    module, rows = model.module, None
    if model.root is not None:
        from trainer.engine.building.by_rows import through
        from trainer.engine.optimizing.row_parameters import RowParameters

        context, rows = through(model.root, context), RowParameters(model.root, context.ranks)
    if context.config.method == "lora":
        _add_adapter(context, module)
    else:
        module.requires_grad_(True)
    module.train()
    if context.config.method == "full":
        _join(context, model)
    if plan.activation_checkpointing:
        _recompute(context, model)
    if plan.compile:
        compile_model(context, model, varies)
    accelerator = Accelerator(cpu=context.device == "cpu", mixed_precision="no")
    assert accelerator.num_processes == context.ranks.size, "accelerate takes the group that is there"
    trainable = {name: value for name, value in module.named_parameters() if value.requires_grad}
    count = sum(parameter.numel() for parameter in trainable.values())
    context.say(f"training {count:,} parameters in {numbered(len(trainable), 'tensor')}")
    updater = Updater(trainable, context.config.train, plan.optimizer, context.ranks, rows)
    if context.config.method == "full":
        updater.follow = functools.partial(follow_weights, module)
    readers: tuple[TextReader, ...] = ()
    if plan.text_padding and context.family.text_keys:
        from trainer.modeling.attention.text_padding import text_readers

        readers = text_readers(module, context.family.text_keys)
    return Built(
        model=module,
        updater=updater,
        accelerator=accelerator,
        staged=model.staged,
        text_readers=readers,
        context=context,
    )


def _join(context: Context, model: Model) -> None:
    """Have trained linears of one input compute together, all in FP8 where the plan says so, and those of a
    row a sample in the compiler's kernels.
    """
    names = linears_of_one_input(context, model)
    if context.plan.weight_gradient:
        context.say(train_in_fp8(context, model, names))
    elif names:
        context.say(f"bf16: {join_linears(context, model, names)}")
    if context.plan.compile:
        multiply_few_rows(model.module, any_of(context.family.modulation))


def load_base(context: Context) -> Model:
    """The trained component with the plan's storage and attention kernel, frozen."""
    plan = context.plan
    context.status.beat(Phase.LOAD)
    model = _streamed(context)
    if not plan.way.trains:
        count, kept = count_quantized(model.module, plan.weights)
        others = f" (modulation in {plan.modulation})" if plan.modulation else ""
        context.say(
            f"{plan.weights} base: {count} linear layers quantised{others}, {kept} kept in {plan.dtype}"
        )
    if plan.swapped_blocks or plan.sharded_blocks:
        model = with_staged_blocks(context, model)
    set_attention(model.module, plan.attention)
    if plan.compute == "fp8" and not plan.way.trains:
        context.say(prove_fp8(context, model.module))
    return model


def _streamed(context: Context) -> Model:
    """The trained component, built on the meta device and filled shard by shard with a bar."""
    plan, family = context.plan, context.family
    shown = 0
    with progress(100, f"loading {family.trained_component or 'model'}, percent") as bar:

        def on_bytes(done: int, total: int) -> None:
            nonlocal shown
            context.stop.raise_if_requested()
            percent = 100 * done // total
            if percent > shown:
                bar.advance(percent - shown)
                shown = percent

        def on_shard(done: int, total: int) -> None:
            context.alive(Phase.LOAD, step=done, total=total, item_done=True)
            if done == total:
                on_bytes(1, 1)

        structure = build_structure(
            family.model_class(context.source),
            context.source,
            family.trained_component,
            device=context.device,
            dtype=context.dtype,
            replace=replacer(plan.way, family.high_precision, family.modulation),
            fill_zeros=context.config.method == "lora",
            absent=functools.partial(absent, context) if plan.sharded_blocks else None,
        )
        blocks = repeated_blocks(structure.module, family.blocks)
        if plan.in_rows:
            from trainer.modeling.base.load_rows import fill_rows

            if plan.weight_gradient:
                rows_in_fp8(context, structure.module)
            rank, size = context.ranks.rank, context.ranks.size
            root = fill_rows(structure, blocks, rank=rank, size=size, on_shard=on_shard, on_bytes=on_bytes)
            return Model(module=root.model, blocks=blocks, root=root)
        filled = fill_structure(
            structure,
            elsewhere=devices(context, blocks),
            readers=file_readers(context, blocks),
            loader=plan.loader,
            on_shard=on_shard,
            on_bytes=on_bytes,
            say=context.say,
        )
    return Model(module=filled, blocks=blocks)


def require_start(context: Context) -> None:
    """Raise ConfigError where the file of `lora.init_from` is not this run's adapter: `build` would say it
    too, after everything is encoded. No weight of the base is read.
    """
    path = context.config.lora.init_from
    if path is not None:
        family, source = context.family, context.source
        folder = source.component(family.trained_component)
        model = built_empty(family.model_class(source), folder, context.dtype)
        _add_fresh_adapter(context, model, "cpu")
        saved_start(model, path)


def _add_adapter(context: Context, model: Any) -> None:
    """Add the seeded adapter, with the values of `lora.init_from` where that is given."""
    settings = context.config.lora
    _add_fresh_adapter(context, model, context.device)
    if settings.init_from is not None:
        count = start_from(model, settings.init_from)
        theirs, ours = read_header(settings.init_from).metadata.get("base_model"), context.source.identity
        other = f", trained on {theirs}, not on {ours}" if theirs not in (None, ours) else ""
        context.say(f"the adapter starts from {settings.init_from}: {numbered(count, 'tensor')}{other}")


def _add_fresh_adapter(context: Context, model: Any, device: str) -> None:
    settings = context.config.lora
    lora.add_lora(
        model,
        rank=settings.rank,
        alpha=settings.alpha,
        pattern=target_pattern(settings, context.family.lora_targets, lora.linear_names(model)),
        seed=context.config.train.seed,
        device=device,
        kind=settings.type,
        dropout=settings.dropout,
        rank_pattern=settings.rank_pattern,
        alpha_pattern=settings.alpha_pattern,
    )


def _recompute(context: Context, model: Model) -> None:
    """Have as many repeated blocks recompute their activations in backward as the plan says."""
    plan, draws = context.plan, has_dropout(model.module)
    # the host's copies are slower than what a graph of its own saves
    inside = plan.compile and not plan.swapped_blocks and not draws
    count = recompute_blocks(model.blocks, plan.recomputed_blocks, draws=draws, inside=inside)
    assert count, f"no block of {', '.join(context.family.blocks)} in the model"
