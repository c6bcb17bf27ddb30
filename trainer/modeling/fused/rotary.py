"""Attention layers of diffusers whose queries and keys get RMSNorm and RoPE in one pass.

Their processors are replaced by processors that compute the same through `norm_rotary`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm

from trainer.modeling.adapter.joined_lora import joined_parts
from trainer.modeling.adapter.low_rank import add_low_rank
from trainer.modeling.fused.norm_rotary import Stream, norm_rotary
from trainer.modeling.fused.norms import FUSED, is_fusible, torch_eps


def fuse_rotary(model: torch.nn.Module) -> int:
    """Let every attention layer of a known kind compute RMSNorm and RoPE in one pass; returns their number.

    Its norms must be frozen, their width a power of two. They stay in the layer: no parameter is renamed.
    """
    count = 0
    for module in model.modules():
        # only these have processors
        if isinstance(module, Attention | AttentionModuleMixin):
            attention: Any = module
            kind = _kind(attention)
            if kind is not None:
                set_processor(attention, kind())
                count += 1
    return count


def set_processor(attention: Any, new: FusedProcessor) -> None:
    """Put `new` in the place of a layer's processor, with the same attention kernel."""
    old = attention.processor
    new._attention_backend, new._parallel_config = old._attention_backend, old._parallel_config
    attention.set_processor(new)


def _kind(attention: Any) -> type[FusedProcessor] | None:
    """The processor for a layer whose own is known by its arguments, and by the layers that it calls.

    Class names are not asked: they belong to the families. None where one pass cannot compute its norms.
    """
    if isinstance(attention.processor, FusedProcessor):
        return None
    layers = dict(attention.named_children())
    norms: list[Any] = [layer for name, layer in layers.items() if name.startswith("norm_")]
    for kind, of_mixin, known in _KINDS:
        arguments = [
            list(inspect.signature(one.__call__).parameters) for one in (type(attention.processor), kind)
        ]
        if (
            isinstance(attention, AttentionModuleMixin) == of_mixin
            and layers.keys() in known
            and arguments[0] == arguments[1]
        ):
            fusible = (
                all(type(norm) in _NORMS and is_fusible(norm) for norm in norms)
                and not any(isinstance(norm, RMSNorm) and norm.bias is not None for norm in norms)
                and len({(len(norm.weight), norm.eps) for norm in norms}) == 1
            )
            return kind if fusible else None
    return None


_NORMS = {*FUSED, *FUSED.values()}


class FusedProcessor:
    """A processor in the place of one of diffusers', which computes the same in fewer passes."""

    _attention_backend: Any = None
    _parallel_config: Any = None
    text_mask: torch.Tensor | None = None
    """(B, text tokens), False for padding; None where no caption is padded. See `text_padding`."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention by the model's kernel: heads (batch, tokens, heads, width) to (batch, tokens, all)."""
        backend, config = self._attention_backend, self._parallel_config
        output: torch.Tensor = dispatch_attention_fn(
            query, key, value, attn_mask=mask, backend=backend, parallel_config=config
        )
        return output.flatten(2, 3).to(query.dtype)


class _RealTables(FusedProcessor):
    """Attention of one stream or two, with a table of cosines and one of sines, each number twice."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute diffusers' processor: the output of the one stream, or the outputs of image and text."""
        assert image_rotary_emb is not None and not attn.fused_projections
        assert (encoder_hidden_states is None) == (attn.added_kv_proj_dim is None)
        if encoder_hidden_states is None:
            return self.attend(*_heads(attn, hidden_states, image_rotary_emb), attention_mask)
        cos, sin = image_rotary_emb
        count = encoder_hidden_states.shape[1]
        text, image = (cos[:count], sin[:count]), (cos[count:], sin[count:])
        heads = _heads(attn, hidden_states, image, encoder_hidden_states, text)
        return _separate(attn, self.attend(*heads, attention_mask), count)


class _ComplexTables(FusedProcessor):
    """Attention of two streams with a table of complex numbers each."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_hidden_states_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute diffusers' processor: outputs of image and text. The mask is the text's (batch, tokens)."""
        assert encoder_hidden_states is not None and image_rotary_emb is not None and attention_mask is None
        text_mask = self.text_mask if encoder_hidden_states_mask is None else encoder_hidden_states_mask
        if text_mask is not None:
            whole = text_mask.new_ones(hidden_states.shape[:2], dtype=torch.bool)
            attention_mask = torch.cat([text_mask, whole], dim=1)[:, None, None, :]
        image, text = ((torch.view_as_real(table).flatten(1),) for table in image_rotary_emb)
        heads = _heads(attn, hidden_states, image, encoder_hidden_states, text)
        return _separate(attn, self.attend(*heads, attention_mask), encoder_hidden_states.shape[1])


class _Parallel(FusedProcessor):
    """Attention of one stream beside a feed-forward, with one product before and one after both."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute diffusers' processor: the output of the stream."""
        assert image_rotary_emb is not None
        widths = [attn.inner_dim] * 3 + [attn.mlp_hidden_dim * attn.mlp_mult_factor]
        *products, inner = attn.to_qkv_mlp_proj(hidden_states).split(widths, dim=-1)
        heads = [one.unflatten(-1, (-1, len(attn.norm_q.weight))) for one in products]
        normed = _normed([(heads, (attn.norm_q, attn.norm_k), image_rotary_emb)])
        attended = self.attend(*normed, attention_mask)
        output: torch.Tensor = attn.to_out(torch.cat([attended, attn.mlp_act_fn(inner)], dim=-1))
        return output


Tables = tuple[torch.Tensor, ...]
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _heads(
    attn: Any,
    image: torch.Tensor,
    image_tables: Tables,
    text: torch.Tensor | None = None,
    text_tables: Tables = (),
) -> Heads:
    """Queries, keys and values of a stream (batch, tokens, channels), or of two, the text's tokens first."""
    streams = [((attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k), image, image_tables)]
    if text is not None:
        layers = attn.add_q_proj, attn.add_k_proj, attn.add_v_proj
        streams.append((layers, (attn.norm_added_q, attn.norm_added_k), text, text_tables))
    parts = [joined_parts(layers, inputs) for layers, _, inputs, _ in streams]
    joint = [
        Stream(part[0], (norms[0].weight, norms[1].weight), tables, *part[1:])
        for part, (_, norms, _, tables) in zip(parts, streams, strict=True)
        if part is not None
    ]
    if len(joint) == len(streams):
        query, key, value = norm_rotary(joint[::-1], torch_eps(attn.norm_q.eps))
        return query, key, value
    apart = []
    for part, (layers, norms, inputs, tables) in zip(parts, streams, strict=True):
        if part is None:
            products = tuple(layer(inputs) for layer in layers)
        else:
            products = add_low_rank(*part[:2], *part[2]).chunk(3, dim=-1)
        apart.append(([one.unflatten(-1, (-1, len(norms[0].weight))) for one in products], norms, tables))
    return _normed(apart[::-1])


def _normed(streams: list[tuple[list[torch.Tensor], tuple[Any, Any], Tables]]) -> Heads:
    """Queries, keys and values of each stream's heads, norms of its queries and keys, and tables."""
    query, key = [
        norm_rotary(
            [Stream(heads[which], (norms[which].weight,), tables) for heads, norms, tables in streams],
            torch_eps(streams[0][1][which].eps),
        )[0]
        for which in range(2)
    ]
    values = [heads[2] for heads, _, _ in streams]
    return query, key, values[0] if len(values) == 1 else torch.cat(values, dim=1)


def _separate(attn: Any, attended: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs for the image's tokens and the text's, which are the first `count` of (batch, tokens, all)."""
    image = attended[:, count:].contiguous()
    for layer in attn.to_out:
        image = layer(image)
    return image, attn.to_add_out(attended[:, :count].contiguous())


_ONE = {"to_q", "to_k", "to_v", "norm_q", "norm_k"}
_TWO = _ONE | {
    *("add_q_proj", "add_k_proj", "add_v_proj", "norm_added_q", "norm_added_k", "to_out", "to_add_out")
}
_BESIDE = {"to_qkv_mlp_proj", "mlp_act_fn", "norm_q", "norm_k", "to_out"}
# what replaces a processor, whether its layer is of diffusers' newer kind, and all layers below it
_KINDS: tuple[tuple[type[FusedProcessor], bool, tuple[set[str], ...]], ...] = (
    (_RealTables, True, (_ONE, _TWO)),
    (_ComplexTables, False, (_TWO,)),
    (_Parallel, True, (_BESIDE,)),
)
