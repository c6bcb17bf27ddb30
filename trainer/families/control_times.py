"""A transformer whose controls are at time 0 and its target at the step's, for CUDA graphs.

diffusers makes the index of both times from Python lists in every forward pass: a copy from the host, which
waits for the device and cannot be captured. Here it is made once for each set of sizes, and stays there.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from trainer.families.diffusion import kept_on_device
from trainer.modeling.blocks.recompute import give_base

_INDEX = "modulate_index"

Sizes = tuple[tuple[tuple[int, int, int], ...], ...]
"""Frames, rows and columns of tokens of every sample's images, the target's first."""


def keep_time_index(model: Any) -> None:
    """Let a transformer with two times take their index from the device; parameters keep their names."""
    if not model.zero_cond_t:
        return
    # diffusers would make both times and the index itself; the blocks keep theirs
    model.zero_cond_t = False
    give_base(model, _Transformer)
    give_base(model.norm_out, _LastNorm)
    for block in model.transformer_blocks:
        give_base(block, _Block)


def time_index(sizes: Sizes, device: torch.device) -> torch.Tensor:
    """(samples, tokens) int32: 0 for the target's tokens, 1 for those of its controls."""
    rows = [[0] * math.prod(target) + [1] * sum(map(math.prod, controls)) for target, *controls in sizes]
    return torch.tensor(rows, device=device, dtype=torch.int)


class _Transformer(torch.nn.Module):
    """First base of the transformer's class, given by `keep_time_index`; it is never constructed."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        timestep: torch.Tensor | None = None,
        img_shapes: list[list[tuple[int, int, int]]] | None = None,
        guidance: torch.Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Call diffusers' own with both times in one batch, and the index among the blocks' arguments.

        The parameters are those that the pipelines give.
        """
        assert timestep is not None and img_shapes is not None
        sizes = tuple(tuple(tuple(image) for image in sample) for sample in img_shapes)
        index = kept_on_device(time_index, sizes, timestep.device)
        return super().forward(
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            encoder_hidden_states_mask=encoder_hidden_states_mask,
            timestep=torch.cat([timestep, timestep * 0]),
            img_shapes=img_shapes,
            guidance=guidance,
            attention_kwargs={**(attention_kwargs or {}), _INDEX: index},
            return_dict=return_dict,
        )


class _Block(torch.nn.Module):
    """First base of a block's class; it is never constructed."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_mask: torch.Tensor | None,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call diffusers' own with the index that the model was given."""
        assert joint_attention_kwargs is not None and modulate_index is None
        others = {name: value for name, value in joint_attention_kwargs.items() if name != _INDEX}
        return super().forward(
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            encoder_hidden_states_mask=encoder_hidden_states_mask,
            temb=temb,
            image_rotary_emb=image_rotary_emb,
            joint_attention_kwargs=others,
            modulate_index=joint_attention_kwargs[_INDEX],
        )


class _LastNorm(torch.nn.Module):
    """First base of the last norm's class; it is never constructed."""

    def forward(self, x: torch.Tensor, conditioning_embedding: torch.Tensor) -> torch.Tensor:
        """Call diffusers' own with the time of the target, which is in the first half."""
        return super().forward(x, conditioning_embedding.chunk(2)[0])
