"""Feed-forwards in FP8 as one: the same numbers as their layers one by one, and which are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from peft import set_peft_model_state_dict

from tests.numerics.saved import kept_bytes
from tests.quantized_layers import from_linear
from tests.unit.modeling.small_models import CONFIGS, Case, Storage, adapt, case, difference, relative
from trainer.modeling.adapter.joined_lora import join_siblings, part_siblings
from trainer.modeling.adapter.lora import ADAPTER, adapter_state, remove_lora
from trainer.modeling.blocks.compiled import eager
from trainer.modeling.fused.feedforward import (
    fp8_feed_forward,
    fuse_feed_forwards,
    gelu_backward_quantize_rows,
    gelu_quantize_rows,
)
from trainer.modeling.fused.norms import fuse_head_norms
from trainer.modeling.storage.fp8_product import quantize_rows
from trainer.modeling.storage.row_scaled import RowScaledLinear

WIDTH, INNER = 32, 96
DTYPES = [torch.float32, torch.bfloat16]
STORAGES: list[Storage] = ["fp8", "fp8_two_copies"]
TOKENS = (2, 5)
# two feed-forwards in a block with two streams, and the one of each block with a single stream
IN_THE_MODEL = 1 * 2 + 2 * 1
# half a unit of the last place
BF16 = 4e-3


def layer(columns: int, rows: int, *, copies: int = 1, dtype: torch.dtype = torch.float32) -> RowScaledLinear:
    linear = torch.nn.Linear(columns, rows).to(dtype).requires_grad_(False)
    return from_linear(linear, "fp8", fp8_compute=True, copies=copies)


def feed_forward(*, copies: int = 1, dtype: torch.dtype = torch.float32, **options: Any) -> FeedForward:
    """diffusers' own, its linears quantised."""
    torch.manual_seed(0)
    made = FeedForward(WIDTH, inner_dim=INNER, **{"activation_fn": "gelu-approximate", **options})
    made.net[0].proj = layer(WIDTH, made.net[0].proj.out_features, copies=copies, dtype=dtype)
    made.net[2] = layer(INNER, WIDTH, copies=copies, dtype=dtype)
    return made


def single_block(*, copies: int = 1, dtype: torch.dtype = torch.float32) -> FluxSingleTransformerBlock:
    torch.manual_seed(0)
    made = FluxSingleTransformerBlock(WIDTH, num_attention_heads=2, attention_head_dim=16, mlp_ratio=3.0)
    made = made.to(dtype).requires_grad_(False)
    made.proj_mlp = layer(WIDTH, INNER, copies=copies, dtype=dtype)
    made.proj_out = layer(WIDTH + INNER, WIDTH, copies=copies, dtype=dtype)
    return made


def leaves(*widths: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Activations whose sizes differ by token."""
    torch.manual_seed(1)
    sizes = torch.logspace(-2, 1, TOKENS[1])[:, None]
    return [(torch.randn(*TOKENS, width) * sizes).to(dtype).requires_grad_(True) for width in widths]


def run(compute: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output, and gradients of the inputs."""
    copies = [one.detach().clone().requires_grad_(True) for one in inputs]
    output = compute(*copies)
    output.float().sin().sum().backward()
    return [output.detach(), *(one.grad for one in copies if one.grad is not None)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert relative(ours, theirs) < 1e-6


def separate(x: torch.Tensor, up: Any, down: Any, left: torch.Tensor | None = None) -> torch.Tensor:
    active = torch.nn.functional.gelu(up(x), approximate="tanh")
    return down(active if left is None else torch.cat([left, active], dim=-1))


# rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beside", [0, 16])
def test_rows_are_quantised_as_if_gelu_were_stored(dtype: torch.dtype, beside: int) -> None:
    values = torch.randn(7, 48).to(dtype)
    left = torch.randn(7, beside).to(dtype) if beside else None
    active = torch.nn.functional.gelu(values, approximate="tanh")
    wanted = quantize_rows(active if left is None else torch.cat([left, active], 1))
    found = gelu_quantize_rows(left, values)
    assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_quantised_as_if_they_were_stored(dtype: torch.dtype) -> None:
    """The gradient is a part of a wider one."""
    values = torch.randn(7, 48).to(dtype).requires_grad_(True)
    given, columns = torch.randn(7, 64).to(dtype)[:, 16:], torch.logspace(-1, 1, 48)
    torch.nn.functional.gelu(values, approximate="tanh").backward(given)
    assert values.grad is not None
    wanted = quantize_rows(values.grad, columns)
    found = gelu_backward_quantize_rows(given, values.detach(), columns)
    assert torch.equal(found[0].float(), wanted[0].float())
    assert torch.allclose(found[1], wanted[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_makes_its_row_nan(bad: float) -> None:
    left, values = torch.randn(5, 16), torch.randn(5, 48)
    left[1, 0] = values[3, 7] = bad
    quantized, scale = gelu_quantize_rows(left, values)
    whole = quantized.float() * scale
    assert whole[[1, 3]].isnan().all() and whole[[0, 2, 4]].isfinite().all()
    gradient = torch.randn(5, 48)
    gradient[0, 5] = bad
    quantized, scale = gelu_backward_quantize_rows(gradient, values, torch.ones(48))
    whole = quantized.float() * scale
    assert whole[0].isnan().all() and whole[[1, 2, 4]].isfinite().all()


# both layers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("beside", [0, 16])
def test_output_and_gradients_are_those_of_the_layers(dtype: torch.dtype, copies: int, beside: int) -> None:
    torch.manual_seed(0)
    up = layer(WIDTH, INNER, copies=copies, dtype=dtype)
    down = layer(beside + INNER, 48, copies=copies, dtype=dtype)
    inputs = leaves(WIDTH, *([beside] if beside else []), dtype=dtype)
    found = run(lambda x, *left: fp8_feed_forward(x, up, down, *left), inputs)
    same(found, run(lambda x, *left: separate(x, up, down, *left), inputs))
    assert len(found) == 1 + len(inputs) and found[0].shape == (*TOKENS, 48)


def test_layers_without_a_bias() -> None:
    up, down = layer(WIDTH, INNER), layer(INNER, WIDTH)
    up.bias = down.bias = None
    (x,) = leaves(WIDTH)
    same(run(lambda x: fp8_feed_forward(x, up, down), [x]), run(lambda x: separate(x, up, down), [x]))


@pytest.mark.parametrize("beside", [0, 16])
def test_what_the_first_layer_gave_alone_is_kept_for_backward(beside: int) -> None:
    up, down = layer(WIDTH, INNER), layer(beside + INNER, WIDTH)
    x, *left = leaves(WIDTH, *([beside] if beside else []))
    both = torch.nn.ModuleList([up, down])
    scales = 4 * (len(up.weight_scale) + len(down.weight_scale))
    assert kept_bytes(both, lambda: fp8_feed_forward(x, up, down, *left)) == 10 * INNER * 4 + scales


def test_a_bad_token_spoils_its_own_output_and_gradient_only() -> None:
    up, down = layer(WIDTH, INNER), layer(INNER, WIDTH)
    x = torch.randn(4, WIDTH)
    x[2, 3] = float("inf")
    output, gradient = run(lambda x: fp8_feed_forward(x, up, down), [x])
    for found in (output, gradient):
        assert found[2].isnan().all() and found[[0, 1, 3]].isfinite().all()


# modules


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copies", [1, 2])
def test_a_fused_feed_forward_is_diffusers_own(dtype: torch.dtype, copies: int) -> None:
    plain, one = (feed_forward(copies=copies, dtype=dtype) for _ in range(2))
    assert fuse_feed_forwards(one) == 1 and fuse_feed_forwards(one) == 0
    assert isinstance(one, FeedForward)
    same(run(one, leaves(WIDTH, dtype=dtype)), run(plain, leaves(WIDTH, dtype=dtype)))
    assert one.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("copies", [1, 2])
def test_a_fused_block_of_one_stream_is_diffusers_own(dtype: torch.dtype, copies: int) -> None:
    plain, one = (single_block(copies=copies, dtype=dtype) for _ in range(2))
    assert fuse_feed_forwards(one) == 1 and fuse_feed_forwards(one) == 0
    # what is compiled is chosen by this
    assert isinstance(one, FluxSingleTransformerBlock)
    assert type(one).__name__ == "FluxSingleTransformerBlock"
    assert one.state_dict().keys() == plain.state_dict().keys()
    angles = torch.randn(7, 8).repeat_interleave(2, dim=1)
    conditioning, rotary = torch.randn(2, WIDTH).to(dtype), (angles.cos(), angles.sin())
    image, text = leaves(WIDTH, WIDTH, dtype=dtype)
    inputs = [image, text[:, :2]]

    def through(block: Any) -> Any:
        return lambda image, text: torch.cat(block(image, text, conditioning, image_rotary_emb=rotary), 1)

    found, wanted = run(through(one), inputs), run(through(plain), inputs)
    assert len(found) == 3
    if dtype == torch.float32:
        same(found, wanted)
    else:
        # gradients of what both branches read are summed in another order
        same(found[:1], wanted[:1])
        assert all(relative(ours, theirs) < 2 * BF16 for ours, theirs in zip(found, wanted, strict=True))
    text_out, image_out = one(*inputs, conditioning, rotary)
    assert (text_out.shape, image_out.shape) == ((2, 2, WIDTH), (2, 5, WIDTH))


def test_other_feed_forwards_are_left_alone() -> None:
    untouched = [
        feed_forward(activation_fn="gelu"),
        feed_forward(activation_fn="geglu-approximate"),
        feed_forward(activation_fn="linear-silu"),
        feed_forward(dropout=0.1),
        feed_forward(final_dropout=True),
        FeedForward(WIDTH, activation_fn="gelu-approximate"),
    ]
    unpacked = feed_forward()
    unpacked.net[2].fp8_compute = False
    exact, odd = single_block(), single_block()
    exact.act_mlp = torch.nn.GELU()
    odd.add_module("another", torch.nn.Identity())
    for module in (*untouched, unpacked, exact, odd):
        kind = type(module)
        assert fuse_feed_forwards(module) == 0 and type(module) is kind


@pytest.mark.parametrize("made", [feed_forward, single_block])
def test_a_layer_that_was_wrapped_since_is_called(made: Any) -> None:
    """A layer that peft wrapped after fusing, to load a LoRA onto the fused model, is called."""

    class Wrapped(torch.nn.Module):
        def __init__(self, base: torch.nn.Module) -> None:
            super().__init__()
            self.base, self.weight, self.calls = base, base.weight, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.base(x)

    one = made()
    arguments = leaves(*[WIDTH] * (1 if made is feed_forward else 2))
    if made is single_block:
        arguments.append(torch.randn(2, WIDTH))
    assert fuse_feed_forwards(one) == 1
    wanted = one(*arguments)
    if made is feed_forward:
        wrapped = one.net[2] = Wrapped(one.net[2])
    else:
        wrapped = one.proj_out = Wrapped(one.proj_out)
    found = one(*arguments)
    assert wrapped.calls == 1
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative(ours, theirs) < 1e-6


# models


def fused(storage: Storage, *, family: str = "flux1_dev", joined: bool = False) -> Case:
    made = case(family, storage=storage)
    if joined:
        fuse_head_norms(made.model)
        join_siblings(made.model, made.predict)
    assert fuse_feed_forwards(made.model) == (4 if family == "qwen_image" else IN_THE_MODEL)
    return made


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("family", ["flux1_dev", "qwen_image"])
def test_a_model_s_outputs_and_adapter_gradients_stay(family: str, storage: Storage) -> None:
    plain, one = case(family, storage=storage), fused(storage, family=family)
    assert one.model.state_dict().keys() == plain.model.state_dict().keys()
    (wanted_output, wanted), (output, found) = plain.gradients(), one.gradients()
    assert relative(output, wanted_output) < 1e-6
    assert difference(found, wanted) < 1e-6


def test_a_model_in_bf16() -> None:
    results = []
    for is_fused in (False, True):
        made = case("flux1_dev", storage="fp8")
        for parameter in made.model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.bfloat16()
        if is_fused:
            assert fuse_feed_forwards(made.model) == IN_THE_MODEL
        results.append(bf16_gradients(made))
    (wanted_output, wanted), (output, found) = results
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, wanted_output)
    assert difference(found, wanted) < 2 * BF16


def bf16_gradients(made: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Gradients of the transformer, called like the family calls it, in another type."""
    config = CONFIGS["flux1_dev"]
    torch.manual_seed(2)
    output = made.model(
        hidden_states=torch.randn(1, 16, config["in_channels"]).bfloat16(),
        encoder_hidden_states=torch.randn(1, 8, config["joint_attention_dim"]).bfloat16(),
        pooled_projections=torch.randn(1, config["pooled_projection_dim"]).bfloat16(),
        timestep=torch.tensor([0.5]).bfloat16(),
        img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(8, 3),
        return_dict=False,
    )[0]
    output.float().sin().sum().backward()
    return output.detach(), {n: p.grad for n, p in made.model.named_parameters() if p.grad is not None}


def test_with_activation_checkpointing() -> None:
    plain, one = case("flux1_dev", storage="fp8"), fused("fp8")
    one.model.enable_gradient_checkpointing()
    (wanted_output, wanted), (output, found) = plain.gradients(), one.gradients()
    assert relative(output, wanted_output) < 1e-6
    assert difference(found, wanted) < 1e-6


@pytest.mark.parametrize("storage", ["plain", "int8"])
def test_models_in_other_types_are_left_alone(storage: Storage) -> None:
    assert fuse_feed_forwards(case("flux1_dev", storage=storage).model) == 0


@pytest.mark.parametrize("family", ["kandinsky5", "llama"])
def test_other_families_have_none(family: str) -> None:
    assert fuse_feed_forwards(case(family, storage="fp8").model) == 0


def test_layers_with_a_lora_are_left_alone() -> None:
    assert fuse_feed_forwards(case("flux1_dev", storage="fp8", preset="all-linear").model) == 0
    made = case("flux1_dev", storage="fp8", adapted=False)
    adapt(made.model, r"transformer_blocks\.0\.ff\.net\.2|single_transformer_blocks\.1\.proj_mlp")
    assert fuse_feed_forwards(made.model) == IN_THE_MODEL - 2


def test_a_fused_model_is_the_plain_one_once_its_lora_is_gone() -> None:
    """The run's proof does this: layers single again, the LoRA off, and on once more."""
    one = fused("fp8", joined=True)
    wanted = case("flux1_dev", storage="fp8")
    part_siblings(one.model)
    output, gradients = one.gradients()
    config, state = one.model.peft_config[ADAPTER], adapter_state(one.model)
    for made in (one, wanted):
        remove_lora(made.model)
    assert relative(one.predict(), wanted.predict()) < 1e-5
    one.model.add_adapter(config, adapter_name=ADAPTER)
    set_peft_model_state_dict(one.model, state, adapter_name=ADAPTER)
    again, gradients_again = one.gradients()
    assert relative(again, output) < 1e-6
    assert difference(gradients_again, gradients) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORAGES)
def test_blocks_compile_as_one_graph_each(storage: Storage) -> None:
    plain, one = fused(storage, joined=True), fused(storage, joined=True)
    torch._dynamo.reset()
    compiled = [m for m in one.model.modules() if type(m).__name__ in one.family.blocks]
    assert len(compiled) == 3
    for block in compiled:
        block.compile(fullgraph=True, backend="aot_eager")
    wanted_output, wanted = plain.gradients()
    with eager():
        assert relative(one.predict(), wanted_output) < 1e-6
    output, found = one.gradients()
    torch._dynamo.reset()
    # roundings that fall to the other side become a step of e4m3
    assert relative(output, wanted_output) < 1e-5
    assert difference(found, wanted) < 1e-3
