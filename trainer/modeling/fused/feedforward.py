"""Feed-forwards over a frozen FP8 base whose GELU is never written: it is computed while quantising.

Between two FP8 linears an activation is a pass over memory of its own, and quantising it the next one; so is
its gradient. Here the second linear's input is quantised straight from what the first one gave, which is all
that is kept for backward, and the first one's gradient straight from that of the activation. The arithmetic
is that of the separate layers, with their roundings.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from diffusers.models.normalization import AdaLayerNormZeroSingle

from trainer.modeling.blocks.recompute import give_base
from trainer.modeling.storage import fp8_product
from trainer.modeling.storage.row_scaled import VALUES, RowScaledLinear

if torch.version.cuda is not None:
    from trainer.modeling.triton import fp8_rows

# the layers of a block that attends and feeds forward beside each other
_SINGLE_STREAM = {"norm", "attn", "proj_mlp", "act_mlp", "proj_out"}


def gelu_quantize_rows(left: torch.Tensor | None, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[left, gelu(values)] as e4m3 (rows, L + N) with an fp32 scale (rows, 1), as `quantize_rows` gives them.

    left (rows, L) or None, values (rows, N), of one type. GELU is the tanh approximation, computed in fp32
    and rounded to that type first. The results are padded for a product, as there.
    """
    if values.device.type != "cpu":
        beside = None if left is None else _rows_in_memory(left)
        rows = fp8_product.padded_rows(values.shape[0])
        return fp8_rows.quantize_rows(
            _rows_in_memory(values), beside, None, "gelu", fp8_product.MOST, fp8_product.LEAST, rows
        )
    active = torch.nn.functional.gelu(values, approximate="tanh")
    return fp8_product.quantize_rows(active if left is None else torch.cat([left, active], dim=1))


def gelu_backward_quantize_rows(
    gradient: torch.Tensor, values: torch.Tensor, column_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """gradient * gelu'(values) * column_scale as e4m3 with a scale a row, see `fp8_product.quantize_rows`.

    gradient and values (rows, N) of one type, to which the first product is rounded; column_scale (N,) fp32.
    The results are padded for a product, as there.
    """
    if values.device.type != "cpu":
        given, rows = _rows_in_memory(gradient), fp8_product.padded_rows(values.shape[0])
        return fp8_rows.quantize_rows(
            _rows_in_memory(values),
            given,
            column_scale,
            "gelu_backward",
            fp8_product.MOST,
            fp8_product.LEAST,
            rows,
        )
    return fp8_product.quantize_rows(
        torch.ops.aten.gelu_backward(gradient, values, approximate="tanh"), column_scale
    )


def _rows_in_memory(matrix: torch.Tensor) -> torch.Tensor:
    """`matrix` where each of its rows lies in one piece, however far they are apart, else a copy."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def fp8_feed_forward(
    inputs: torch.Tensor, up: RowScaledLinear, down: RowScaledLinear, left: torch.Tensor | None = None
) -> torch.Tensor:
    """down([left, gelu(up(inputs))]): inputs (..., in), left (..., L) or None, the result (..., out).

    Both layers compute in FP8. `inputs` and `left` have gradients; of activations up(inputs) alone is kept.
    """
    beside = None if left is None else left.reshape(-1, left.shape[-1])
    rows = inputs.reshape(-1, inputs.shape[-1])
    output: torch.Tensor = _FeedForward.apply(beside, rows, *_stored(up), *_stored(down))
    return output.reshape(*inputs.shape[:-1], down.out_features)


def _stored(
    layer: RowScaledLinear,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Weight, scale, bias and transposed copy, as `fp8_product.fp8_linear` takes them."""
    kind = VALUES[layer.kind]
    copy = None if layer.transposed is None else layer.transposed.view(kind)
    return layer.weight.view(kind), layer.weight_scale, layer.bias, copy


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        left: torch.Tensor | None,
        inputs: torch.Tensor,
        up: torch.Tensor,
        up_scale: torch.Tensor,
        up_bias: torch.Tensor | None,
        up_transposed: torch.Tensor | None,
        down: torch.Tensor,
        down_scale: torch.Tensor,
        down_bias: torch.Tensor | None,
        down_transposed: torch.Tensor | None,
    ) -> torch.Tensor:
        rows, dtype = inputs.shape[0], inputs.dtype
        quantized, row_scale = fp8_product.quantize_rows(inputs, pad=True)
        values = fp8_product.multiply(quantized, row_scale, up.t(), up_scale.t(), up_bias, dtype, rows=rows)
        ctx.width = 0 if left is None else left.shape[1]
        ctx.is_transposed = up_transposed is not None, down_transposed is not None
        up_kept = up if up_transposed is None else up_transposed
        down_kept = down if down_transposed is None else down_transposed
        ctx.save_for_backward(values, up_kept, up_scale, down_kept, down_scale)
        quantized, row_scale = gelu_quantize_rows(left, values)
        return fp8_product.multiply(
            quantized, row_scale, down.t(), down_scale.t(), down_bias, dtype, rows=rows
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, up, up_scale, down, down_scale = ctx.saved_tensors
        up_transposed, down_transposed = ctx.is_transposed
        rows, dtype = gradient.shape[0], gradient.dtype
        quantized, row_scale = fp8_product.quantize_rows(gradient, down_scale.view(-1), pad=True)
        hidden = fp8_product.times_weight(
            quantized, row_scale, down, is_transposed=down_transposed, dtype=dtype, rows=rows
        )
        of_left = hidden[:, : ctx.width].contiguous() if ctx.width else None
        quantized, row_scale = gelu_backward_quantize_rows(hidden[:, ctx.width :], values, up_scale.view(-1))
        of_inputs = fp8_product.times_weight(
            quantized, row_scale, up, is_transposed=up_transposed, dtype=dtype, rows=rows
        )
        return of_left, of_inputs, *(None,) * 8


def fuse_feed_forwards(model: torch.nn.Module) -> int:
    """Let every feed-forward with GELU between two frozen FP8 layers compute as one; returns their number.

    Layers with an adapter are left alone. Parameters and their names stay, so there is no way back.
    """
    count = 0
    for module in model.modules():
        if _is_feed_forward(module):
            module.__class__ = _FusedFeedForward
        elif _is_single_stream(module):
            give_base(module, _SingleStream)
        else:
            continue
        count += 1
    return count


def _is_feed_forward(module: Any) -> bool:
    if type(module) is not FeedForward or len(module.net) != 3:
        return False
    first, dropout, down = module.net
    return (
        type(first) is GELU
        and first.approximate == "tanh"
        and type(dropout) is torch.nn.Dropout
        and dropout.p == 0
        and _in_fp8(first.proj, down)
    )


def _is_single_stream(module: Any) -> bool:
    """True for diffusers' single-stream block, known by its layers and by the arguments of its `forward`.

    Class names are not asked: they belong to the families.
    """
    kind, layers = type(module), {name for name, _ in module.named_children()}
    if issubclass(kind, _SingleStream) or layers != _SINGLE_STREAM:
        return False
    arguments = [list(inspect.signature(one.forward).parameters) for one in (kind, _SingleStream)]
    return (
        arguments[0] == arguments[1]
        and type(module.norm) is AdaLayerNormZeroSingle
        and type(module.act_mlp) is torch.nn.GELU
        and module.act_mlp.approximate == "tanh"
        and _in_fp8(module.proj_mlp, module.proj_out)
    )


def _in_fp8(*layers: torch.nn.Module) -> bool:
    """True where all layers are quantised, compute in FP8, and have no adapter."""
    return all(type(layer) is RowScaledLinear and layer.fp8_compute for layer in layers)


class _FusedFeedForward(FeedForward):
    """Class that `fuse_feed_forwards` assigns to a module; it is never constructed."""

    net: Any

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute diffusers' forward pass, by diffusers' own code where a layer has an adapter."""
        up, down = self.net[0].proj, self.net[2]
        if not _in_fp8(up, down):
            return super().forward(hidden_states)
        return fp8_feed_forward(hidden_states, up, down)


class _SingleStream(torch.nn.Module):
    """A block that attends and feeds forward beside each other, with one last layer for both.

    Given to a block's class as first base.
    """

    norm: torch.nn.Module
    attn: torch.nn.Module
    proj_mlp: RowScaledLinear
    proj_out: RowScaledLinear

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute diffusers' forward pass, by diffusers' own code where a layer has an adapter.

        Takes image and text tokens (batch, tokens, width); returns the text tokens and the image tokens.
        """
        if not _in_fp8(self.proj_mlp, self.proj_out):
            return super().forward(
                hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs
            )
        residual = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        normed, gate = self.norm(residual, emb=temb)
        attended = self.attn(
            hidden_states=normed, image_rotary_emb=image_rotary_emb, **(joint_attention_kwargs or {})
        )
        changed = fp8_feed_forward(normed, self.proj_mlp, self.proj_out, attended)
        result = residual + gate.unsqueeze(1) * changed
        if result.dtype == torch.float16:
            result = result.clip(-65504, 65504)
        tokens = encoder_hidden_states.shape[1]
        return result[:, :tokens], result[:, tokens:]
