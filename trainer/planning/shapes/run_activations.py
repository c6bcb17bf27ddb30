"""Activations of one run's micro-batch: what the family's counts give for its model and samples. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainer.config.schema import RunConfig
from trainer.families import language
from trainer.families.family import Family
from trainer.families.values import Shape
from trainer.planning.shapes.activations import FP8, PLAIN, Activations, Units, activations, counted
from trainer.planning.shapes.adapters import PlannedAdapter
from trainer.planning.shapes.geometry import Stack

_ATTENTION_PRESET = "attention"
# one logit of two bytes with its fp32 copy; where logits exist again in the backward pass, with gradients
# too. Both were measured on an H200
_LOGIT_BYTES, _LOGIT_BYTES_AGAIN = 6, 12


class RunActivations(NamedTuple):
    """Bytes that a micro-batch keeps and holds, by the way it is computed."""

    eager: Activations
    compiled: Activations
    in_fp8: Activations | None
    """Compiled, with products of trained weights in FP8; None where these were not counted."""


def run_activations(
    family: Family,
    config: RunConfig,
    model_config: Mapping[str, Any],
    shape: Shape,
    repeated: Sequence[Stack],
    adapter: PlannedAdapter,
    *,
    dtype: str,
) -> RunActivations:
    """Bytes that a micro-batch keeps of `repeated` blocks, from the family's counts."""
    full = config.method == "full"
    linear_inputs = full or config.lora.target_modules != _ATTENTION_PRESET

    def planned(*, compiled: bool, trained: str = PLAIN if full else "") -> Activations:
        more = language.MoreValues()
        if family.sample_kind == "conversation":  # its blocks were counted of another shape
            more = language.more_values(
                model_config, linear_inputs=linear_inputs, compiled=compiled, trained=full
            )
        return activations(
            counted(family.counted_as(model_config)),
            {stack.name: stack.blocks for stack in repeated},
            activation_units(family, model_config, shape),
            compiled=compiled,
            linear_inputs=linear_inputs,
            more=more,
            head=head_bytes(family, model_config, shape, again=adapter.of_head or dtype == "fp16"),
            adapter=adapter.kept,
            spared=adapter.spared,
            trained=trained,
        )

    in_fp8 = planned(compiled=True, trained=FP8) if full else None
    return RunActivations(
        eager=planned(compiled=False),
        compiled=planned(compiled=True),
        in_fp8=None if in_fp8 is None or in_fp8.stand_in else in_fp8,
    )


def activation_units(family: Family, model_config: Mapping[str, Any], shape: Shape) -> Units:
    """Bytes of one value of every token of a micro-batch."""
    attention = family.attention_shape(model_config, shape)
    value = model_config.get("hidden_size", attention.heads * attention.head_width) * shape.bytes_per_value
    return attention.batch_size * attention.tokens * value, shape.batch_size * shape.text_tokens * value


def head_bytes(family: Family, model_config: Mapping[str, Any], shape: Shape, *, again: bool = False) -> int:
    """The most that a language model's head takes: logits, and the gradient of every token's state; 0 for
    others, whose heads are no larger than a block.

    `again`: its logits are made again in the backward pass, as `language.losses` says.
    """
    if family.sample_kind != "conversation":
        return 0
    tokens = shape.batch_size * shape.text_tokens
    logits = min(tokens, language.LOGITS_TOKENS) * model_config["vocab_size"]
    size = logits * (_LOGIT_BYTES_AGAIN if again else _LOGIT_BYTES)
    return int(size + tokens * model_config["hidden_size"] * shape.bytes_per_value)
