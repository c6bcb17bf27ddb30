"""Query and key heads from their products to attention in one pass: norm, rotary embedding, joining.

Apart, these are three passes over memory each way, and complex tables make a compiler fall back to a kernel
for every step. Attention layers get a processor that computes what theirs did.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm

from trainer.modeling.adapter.joined_lora import Parts, joined_parts, joined_product
from trainer.modeling.adapter.low_rank import add_low_rank
from trainer.modeling.fused.joint_qkv import wide_norm_rotary
from trainer.modeling.fused.norms import FUSED, is_fusible
from trainer.modeling.fused.rotation import Part, turned, turned_back

if torch.version.cuda is not None:
    from trainer.modeling.triton import rotary


def norm_rotary(first: Part, second: Part | None, eps: float) -> torch.Tensor:
    """Heads of all tokens, those of `first` first, each divided by its rms, weighed, and turned by its token.

    Values 2 i and 2 i + 1 are real and imaginary part of what is multiplied by cos_i + sin_i j. Computed in
    fp32, of the values' type, contiguous. The width is a power of two; values alone have a gradient.
    """
    result: torch.Tensor = _NormRotary.apply(*first, *(second or _NO_PART), eps)
    return result


_NO_PART = (None, None, None, None)


class _NormRotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        first: torch.Tensor,
        first_weight: torch.Tensor,
        first_cos: torch.Tensor,
        first_sin: torch.Tensor | None,
        second: torch.Tensor | None,
        second_weight: torch.Tensor | None,
        second_cos: torch.Tensor | None,
        second_sin: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        parts = (
            *(first, first_weight, first_cos, first_sin),
            *(second, second_weight, second_cos, second_sin),
        )
        ctx.save_for_backward(*parts)
        ctx.eps = eps
        if first.device.type != "cpu":
            return rotary.norm_rotary(*parts, eps)
        result = turned((first, first_weight, first_cos, first_sin), eps)
        if second is None or second_weight is None or second_cos is None:
            return result
        return torch.cat([result, turned((second, second_weight, second_cos, second_sin), eps)], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = ctx.saved_tensors
        is_joined = parts[4] is not None
        if gradient.device.type != "cpu":
            found = rotary.norm_rotary_backward(gradient, *parts, ctx.eps)
        else:
            tokens = parts[0].shape[1]
            found = [turned_back(gradient[:, :tokens], parts[:4], ctx.eps)]
            if is_joined:
                found.append(turned_back(gradient[:, tokens:], parts[4:], ctx.eps))
        return found[0], None, None, None, found[1] if is_joined else None, None, None, None, None


def fuse_rotary(model: torch.nn.Module) -> int:
    """Let every attention layer of a known kind norm and turn its heads in one pass; returns their number.

    Its norms must be frozen, their width a power of two. They stay where they are: no parameter is renamed.
    """
    count = 0
    for module in model.modules():
        # only these have processors
        if not isinstance(module, Attention | AttentionModuleMixin):
            continue
        attention: Any = module
        kind = _kind(attention)
        if kind is not None:
            old, new = attention.processor, kind()
            new._attention_backend, new._parallel_config = old._attention_backend, old._parallel_config
            attention.set_processor(new)
            count += 1
    return count


def _kind(attention: Any) -> type[FusedProcessor] | None:
    """What takes the place of a layer's processor: known by its arguments, and by the layers that it calls.

    No name of a class: those belong to the families.
    """
    if isinstance(attention.processor, FusedProcessor):
        return None
    layers = dict(attention.named_children())
    arguments = _arguments(type(attention.processor))
    is_mixin = isinstance(attention, AttentionModuleMixin)
    for kind, of_mixin, known in _KINDS:
        if is_mixin == of_mixin and layers.keys() in known and arguments == _arguments(kind):
            norms = [layer for name, layer in layers.items() if name.startswith("norm_")]
            return kind if _fusible(norms) else None
    return None


def _arguments(processor: Any) -> list[str]:
    return list(inspect.signature(processor.__call__).parameters)


def _fusible(norms: list[Any]) -> bool:
    """Whether one pass can compute these norms."""
    return (
        all(type(norm) in _NORMS and is_fusible(norm) for norm in norms)
        and not any(isinstance(norm, RMSNorm) and norm.bias is not None for norm in norms)
        and len({(len(norm.weight), norm.eps) for norm in norms}) == 1
    )


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
        output: torch.Tensor = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
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
        """As diffusers': the output for the stream, or those for image and text."""
        assert image_rotary_emb is not None and not attn.fused_projections
        assert (encoder_hidden_states is None) == (attn.added_kv_proj_dim is None)
        cos, sin = image_rotary_emb
        if encoder_hidden_states is None:
            return self.attend(*_own(attn, hidden_states, cos, sin), attention_mask)
        count = encoder_hidden_states.shape[1]
        text, image = (cos[:count], sin[:count]), (cos[count:], sin[count:])
        heads = _joined(attn, hidden_states, encoder_hidden_states, image, text)
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
        """As diffusers': outputs for image and text. The mask (batch, tokens) is that of the text."""
        assert encoder_hidden_states is not None and image_rotary_emb is not None and attention_mask is None
        text_mask = self.text_mask if encoder_hidden_states_mask is None else encoder_hidden_states_mask
        if text_mask is not None:
            whole = text_mask.new_ones(hidden_states.shape[:2], dtype=torch.bool)
            attention_mask = torch.cat([text_mask, whole], dim=1)[:, None, None, :]
        image, text = ((torch.view_as_real(table).flatten(1), None) for table in image_rotary_emb)
        heads = _joined(attn, hidden_states, encoder_hidden_states, image, text)
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
        """As diffusers'."""
        assert image_rotary_emb is not None
        widths = [attn.inner_dim] * 3 + [attn.mlp_hidden_dim * attn.mlp_mult_factor]
        *heads, inner = attn.to_qkv_mlp_proj(hidden_states).split(widths, dim=-1)
        query, key, value = (_heads(attn, one) for one in heads)
        cos, sin = image_rotary_emb
        query, key = _turn(attn.norm_q, query, cos, sin), _turn(attn.norm_k, key, cos, sin)
        attended = self.attend(query, key, value, attention_mask)
        output: torch.Tensor = attn.to_out(torch.cat([attended, attn.mlp_act_fn(inner)], dim=-1))
        return output


def _heads(attn: Any, values: torch.Tensor) -> torch.Tensor:
    """(batch, tokens, heads, width) of (batch, tokens, all)."""
    return values.unflatten(-1, (-1, len(attn.norm_q.weight)))


def _turn(norm: Any, values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return norm_rotary((values, norm.weight, cos, sin), None, _eps(norm))


def _eps(norm: Any) -> float:
    """torch's own where none is set, see `norms`."""
    return torch.finfo(torch.float32).eps if norm.eps is None else norm.eps


def _products(layers: tuple[Any, Any, Any], inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One product with queries, keys and values beside each other, or where there is none, three."""
    wide = joined_product(layers, inputs)
    return tuple(layer(inputs) for layer in layers) if wide is None else (wide,)


def _summed(
    parts: Parts | None, layers: tuple[Any, Any, Any], inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """`_products` of layers whose `joined_parts` are known."""
    return (
        tuple(layer(inputs) for layer in layers) if parts is None else (add_low_rank(*parts[:2], *parts[2]),)
    )


def _apart(attn: Any, products: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Heads of queries, keys and values from `_products`."""
    return [_heads(attn, one) for one in (products if len(products) == 3 else products[0].chunk(3, dim=-1))]


def _own(
    attn: Any, inputs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of one stream (batch, tokens, channels)."""
    products = _products((attn.to_q, attn.to_k, attn.to_v), inputs)
    if len(products) == 1:
        part = products[0], attn.norm_q.weight, attn.norm_k.weight, cos, sin
        return wide_norm_rotary(part, None, _eps(attn.norm_q))
    query, key, value = _apart(attn, products)
    return _turn(attn.norm_q, query, cos, sin), _turn(attn.norm_k, key, cos, sin), value


def _joined(
    attn: Any,
    image: torch.Tensor,
    text: torch.Tensor,
    image_tables: tuple[torch.Tensor, torch.Tensor | None],
    text_tables: tuple[torch.Tensor, torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of two streams (batch, tokens, channels), the text's tokens first."""
    layers = (attn.to_q, attn.to_k, attn.to_v)
    added_layers = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    own, added = joined_parts(layers, image), joined_parts(added_layers, text)
    if own is not None and added is not None:
        return wide_norm_rotary(
            (added[0], attn.norm_added_q.weight, attn.norm_added_k.weight, *text_tables),
            (own[0], attn.norm_q.weight, attn.norm_k.weight, *image_tables),
            _eps(attn.norm_q),
            (added[1:], own[1:]),
        )
    query, key, value = _apart(attn, _summed(own, layers, image))
    added_query, added_key, added_value = _apart(attn, _summed(added, added_layers, text))
    joined = [
        norm_rotary(
            (first, first_norm.weight, *text_tables), (second, norm.weight, *image_tables), _eps(norm)
        )
        for first, first_norm, second, norm in (
            (added_query, attn.norm_added_q, query, attn.norm_q),
            (added_key, attn.norm_added_k, key, attn.norm_k),
        )
    ]
    return joined[0], joined[1], torch.cat([added_value, value], dim=1)


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
