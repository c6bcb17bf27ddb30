"""From files to a model that can train, in the one order that is right.

build on meta -> quantised linears while shards stream in, those of blocks that wait into host memory ->
attention -> LoRA -> activation checkpointing -> joined layers -> compile -> optimizer. Resume comes after all
of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate import Accelerator

from trainer.engine.building.fast import NOTHING_VARIES, Varies, compile_model, prove_fp8
from trainer.engine.context import Context
from trainer.engine.optimizing.optimizer import Updater
from trainer.errors import HardwareError
from trainer.modeling.adapter import lora
from trainer.modeling.adapter.start_from import start_from
from trainer.modeling.adapter.targets import target_pattern
from trainer.modeling.attention.setting import set_attention
from trainer.modeling.attention.text_lengths import TextReader
from trainer.modeling.base.load import build_structure, fill_structure
from trainer.modeling.blocks.recompute import has_dropout, recompute_blocks
from trainer.modeling.storage.quantize import QUANTIZED, Replace, count_quantized, replacer
from trainer.modeling.storage.swap import swap_blocks, waiting_blocks
from trainer.planning.cost.memory import gib
from trainer.telemetry.progress import progress
from trainer.telemetry.status import Phase


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model ready to train."""

    model: Any
    updater: Updater
    accelerator: Accelerator
    text_readers: tuple[TextReader, ...] = ()
    """What leaves the padding of captions out; none where captions are not padded."""


def load_base(context: Context) -> Any:
    """The trained component with the plan's storage and attention kernel, frozen."""
    plan, family = context.plan, context.family
    context.status.beat(Phase.LOAD)
    shown = 0
    with progress(100, f"loading {family.trained_component}, percent") as bar:

        def show(percent: int) -> None:
            nonlocal shown
            bar.advance(percent - shown)
            shown = percent

        def on_bytes(done: int, total: int) -> None:
            context.stop.raise_if_requested()
            show(100 * done // total)

        def on_shard(done: int, total: int) -> None:
            context.stop.raise_if_requested()
            context.status.beat(Phase.LOAD, step=done, total=total, item_done=True)
            if done == total:
                show(100)

        structure = build_structure(
            family.model_class(context.source),
            context.source,
            family.trained_component,
            device=context.device,
            dtype=context.dtype,
            replace=_replacer(context),
            fill_zeros=context.config.method == "lora",
        )
        count = plan.swapped_blocks
        model: Any = fill_structure(
            structure,
            on_host=waiting_blocks(structure.module, family.blocks, count) if count else (),
            loader=plan.loader,
            on_shard=on_shard,
            on_bytes=on_bytes,
            say=context.say,
        )
    if plan.weights in QUANTIZED:
        count, kept = count_quantized(model, plan.weights)
        others = f" (modulation in {plan.modulation})" if plan.modulation else ""
        said = f"{count} linear layers quantised{others}, {kept} kept in {plan.dtype}"
        context.say(f"{plan.weights} base: {said}")
    if plan.swapped_blocks:
        _swap(context, model)
    set_attention(model, plan.attention)
    if plan.compute == "fp8":
        context.say(prove_fp8(context, model))
    return model


def _replacer(context: Context) -> Replace | None:
    """What stores linear layers as the plan says."""
    plan, family = context.plan, context.family
    return replacer(
        plan.weights,
        family.high_precision,
        family.modulation,
        fp8_compute=plan.compute == "fp8",
        copies=plan.weight_copies,
        modulation_as="int8" if plan.modulation == "int8" else "",
    )


def _swap(context: Context, model: Any) -> None:
    plan = context.plan
    assert plan.activation_checkpointing and not plan.cuda_graphs, "kept activations would keep weights"
    swapped = swap_blocks(model, context.family.blocks, plan.swapped_blocks, device=context.device)
    context.say(
        f"{swapped.number} blocks wait in host memory ({gib(swapped.host_bytes)}) and pass through"
        f" {gib(swapped.device_bytes)} of the device's"
    )


def build(context: Context, varies: Varies = NOTHING_VARIES) -> Built:
    """Load the base, make it trainable by the configured method, and attach optimizer and process group.

    Compiled blocks serve every size of what `varies`, and of the rest the first one until another comes.
    """
    model = load_base(context)
    config = context.config
    if config.method == "lora":
        names = lora.linear_names(model)
        pattern = target_pattern(config.lora, context.family.lora_targets, names)
        lora.add_lora(
            model,
            rank=config.lora.rank,
            alpha=config.lora.alpha,
            pattern=pattern,
            seed=config.train.seed,
            device=context.device,
            kind=config.lora.type,
            dropout=config.lora.dropout,
            rank_pattern=config.lora.rank_pattern,
            alpha_pattern=config.lora.alpha_pattern,
        )
        if config.lora.init_from is not None:
            count = start_from(model, config.lora.init_from)
            context.say(f"the adapter starts from {config.lora.init_from}: {count} tensors")
    else:
        model.requires_grad_(True)
    model.train()
    if context.plan.activation_checkpointing:
        draws = has_dropout(model)
        # a graph keeps the weights that it reads, and those of blocks that wait are not to stay
        inside = context.plan.compile and not context.plan.swapped_blocks and not draws
        number = context.plan.recomputed_blocks
        count = recompute_blocks(model, context.family.blocks, number, draws=draws, inside=inside)
        assert count, f"no block of {', '.join(context.family.blocks)} in the model"
    if context.plan.compile:
        compile_model(context, model, varies)
    accelerator = Accelerator(cpu=context.device == "cpu", mixed_precision="no")
    if accelerator.num_processes != 1:
        raise HardwareError(
            f"{accelerator.num_processes} processes were started; this version trains on one device",
            remedy="start `trainer train` itself, without torchrun or accelerate launch",
        )
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    count = sum(parameter.numel() for parameter in trainable.values())
    context.say(f"training {count:,} parameters in {len(trainable)} tensors")
    updater = Updater(trainable, config.train, context.plan.optimizer)
    return Built(
        model=model, updater=updater, accelerator=accelerator, text_readers=_text_readers(context, model)
    )


def _text_readers(context: Context, model: Any) -> tuple[TextReader, ...]:
    """What leaves the padding of captions out; nothing where they are not padded."""
    if not context.plan.text_padding:
        return ()
    from trainer.modeling.attention.text_padding import text_readers

    return text_readers(model, context.family.text_keys)
