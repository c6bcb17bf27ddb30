"""Norm and rotary embedding of heads in one pass: the same numbers as diffusers' steps, and which layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from diffusers import Flux2Transformer2DModel
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

from tests.numerics.saved import kept_bytes
from tests.reached import reach
from tests.unit.modeling.small_models import Case, adapt, case, difference, relative, with_inputs
from tests.unit.modeling.streams import Part, norm_rotary
from trainer.config.schema import FlowSection
from trainer.families import draws
from trainer.families.flux2_dev import FLUX2_DEV
from trainer.families.values import Shape
from trainer.modeling.adapter.joined_lora import join_siblings, part_siblings
from trainer.modeling.attention.setting import set_attention
from trainer.modeling.blocks.compiled import graphs_compiled
from trainer.modeling.fused.norms import fuse_head_norms
from trainer.modeling.fused.rotary import fuse_rotary
from trainer.ways.kernels import KERNELS

EPS = 1e-6
# of sums in fp32 that are made in another order
ROUNDING = 1e-5
FLUX2 = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "timestep_guidance_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}
# attention layers of each small model
LAYERS = {"flux1_dev": 1 + 2, "flux2_dev": 1 + 2, "qwen_image": 2}
# graphs of one size, with gradients of all blocks' inputs: FLUX.1's first single block gets a part of a
# tensor, with strides of its own
GRAPHS = {"flux1_dev": 3, "flux2_dev": 2, "qwen_image": 1}


@pytest.fixture(autouse=True)
def whole_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo both settings of the whole process: compiled code, and diffusers' active kernel."""
    registry = _AttentionBackendRegistry
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# the function


def tables(tokens: int, width: int, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """RoPE tables of the models: cos and sin with every number twice, or complex numbers seen as real."""
    angles = torch.randn(tokens, width // 2) * 3
    if kind == "complex":
        return torch.view_as_real(torch.polar(torch.ones_like(angles), angles)).flatten(1), None
    return angles.cos().repeat_interleave(2, dim=1), angles.sin().repeat_interleave(2, dim=1)


def part(tokens: int, kind: str, *, width: int = 32, dtype: torch.dtype = torch.float32) -> Part:
    """Keys of a joint product with sizes that differ by token, a weight, and tables."""
    sizes = torch.logspace(-2, 2, tokens)[:, None]
    wide = (torch.randn(2, tokens, 3 * 3 * width) * sizes).to(dtype)
    values = wide[..., 3 * width : 6 * width].unflatten(-1, (3, width))
    return values, torch.rand(width).add(0.5).to(dtype), *tables(tokens, width, kind)


def steps(first: Part, second: Part | None, kind: str) -> torch.Tensor:
    """The same RMSNorm and RoPE by diffusers' functions."""
    turned = []
    for values, weight, cos, sin in (first, *([second] if second else [])):
        normed = torch.nn.functional.rms_norm(values, (values.shape[-1],), weight, EPS)
        if kind == "complex":
            table = torch.view_as_complex(cos.unflatten(-1, (-1, 2)))
            turned.append(apply_rotary_emb_qwen(normed, table, use_real=False))
        else:
            turned.append(apply_rotary_emb(normed, (cos, sin), sequence_dim=1))
    return torch.cat(turned, dim=1)


def run(compute: Callable[..., torch.Tensor], first: Part, second: Part | None, last: Any) -> Any:
    """Output, and gradients of both parts' values."""
    leaves = [one[0].detach().clone().requires_grad_(True) for one in (first, second) if one is not None]
    parts = [(leaf, *one[1:]) for leaf, one in zip(leaves, (first, second), strict=False)]
    output = compute(parts[0], parts[1] if second else None, last)
    output.float().sin().sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("width", [16, 64, 128])
def test_fp32_output_and_gradients_are_diffusers_own(kind: str, joined: bool, width: int) -> None:
    torch.manual_seed(0)
    first = part(7, kind, width=width)
    second = part(5, kind, width=width) if joined else None
    wanted, found = run(steps, first, second, kind), run(norm_rotary, first, second, EPS)
    assert len(found) == len(wanted) == 2 + joined
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape and relative(ours, theirs) < 1e-6


@pytest.mark.parametrize("kind", ["real", "complex"])
def test_bf16_is_rounded_once(kind: str) -> None:
    torch.manual_seed(0)
    first, second = (part(tokens, kind, dtype=torch.bfloat16) for tokens in (7, 5))
    wide = [(values.float(), weight.float(), *rest) for values, weight, *rest in (first, second)]
    exact, wanted = run(steps, *wide, kind), run(steps, first, second, kind)
    found = run(norm_rotary, first, second, EPS)
    for ours, theirs, reference in zip(found, wanted, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative(ours, reference) < 1.05 * relative(theirs, reference) < 1e-2


def test_the_other_columns_of_real_tables_do_not_count() -> None:
    values, weight, cos, sin = part(7, "real")
    assert sin is not None
    wanted = norm_rotary((values, weight, cos, sin), None, EPS)
    spoiled = [table.clone().index_fill_(1, torch.arange(1, 32, 2), 9.0) for table in (cos, sin)]
    assert torch.equal(norm_rotary((values, weight, *spoiled), None, EPS), wanted)


def test_heads_that_do_not_lie_in_one_piece() -> None:
    values, *rest = part(7, "complex")
    spread = torch.stack((values, values), dim=-1)[..., 0]
    assert spread.stride(-1) == 2
    assert torch.equal(norm_rotary((spread, *rest), None, EPS), norm_rotary((values, *rest), None, EPS))


def test_only_what_it_is_given_is_kept_for_backward() -> None:
    first, second = part(7, "real"), part(5, "real")
    leaves = [(one[0].contiguous().requires_grad_(True), *one[1:]) for one in (first, second)]
    weights = torch.nn.ParameterList([one[1] for one in leaves])
    given = sum(tensor.numel() * 4 for one in leaves for tensor in (one[0], *one[2:]))
    assert kept_bytes(weights, lambda: norm_rotary(*leaves, EPS)) == given


# models


def made(family: str, *, adapted: bool = True, changes: dict[str, Any] | None = None) -> Case:
    if family != "flux2_dev":
        return case(family, adapted=adapted, changes=changes)
    torch.manual_seed(0)
    model: Any = Flux2Transformer2DModel(**{**FLUX2, **(changes or {})}).requires_grad_(False)
    if adapted:
        adapt(model, FLUX2_DEV.lora_targets["attention"])
    shape = Shape(batch_size=2, width=64, height=64, text_tokens=16, bytes_per_value=4)
    batch = FLUX2_DEV.synthetic_batch(FLUX2, shape, seed=1)
    settings = draws.FlowSettings(
        sigmas=torch.linspace(1000, 1, 1000) / 1000,
        flow=FlowSection(),
        seed=3,
        scheduler={"use_dynamic_shifting": False},
    )
    header = {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}
    draw = FLUX2_DEV.draw(settings, [0, 1], header)
    return Case(family=FLUX2_DEV, model=model.train(), batch=batch, draw=draw, settings=settings)


def weigh_norms(model: torch.nn.Module) -> None:
    """Norms of a new model weigh with ones, which would hide which norm is whose."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if ".norm_" in name:
            torch.nn.init.uniform_(parameter, 0.5, 2.0)


def pair(family: str, **options: Any) -> tuple[Case, Case]:
    """Two equal models."""
    both = made(family, **options), made(family, **options)
    for one in both:
        weigh_norms(one.model)
    return both


def same(one: Case, wanted: Case) -> None:
    (wanted_output, wanted_gradients), (output, gradients) = wanted.gradients(), one.gradients()
    assert relative(output, wanted_output) < ROUNDING
    # compiled, a layer that the output does not depend on has zeros
    unused = gradients.keys() - wanted_gradients.keys()
    assert not any(gradients.pop(name).any() for name in unused)
    assert difference(gradients, wanted_gradients) < ROUNDING


@pytest.mark.parametrize("family", LAYERS)
def test_outputs_and_gradients_stay(family: str) -> None:
    plain, one = pair(family)
    names = list(one.model.state_dict())
    assert fuse_rotary(one.model) == LAYERS[family]
    same(one, plain)
    assert list(one.model.state_dict()) == names
    assert fuse_rotary(one.model) == 0


@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("first", ["norms", "rotary"])
def test_it_is_one_of_several_changes(family: str, first: str) -> None:
    """Layers joined before or after, norms fused before or after, and layers parted again."""
    plain, one = pair(family)
    if first == "rotary":
        assert fuse_rotary(one.model) == LAYERS[family]
    norms = fuse_head_norms(one.model)
    assert norms >= 2 * LAYERS[family]
    assert join_siblings(one.model, one.predict) > 0
    if first == "norms":
        assert fuse_rotary(one.model) == LAYERS[family]
    for _ in range(2):
        same(one, plain)
    part_siblings(one.model)
    same(one, plain)


@pytest.mark.parametrize("family", LAYERS)
def test_without_gradients_and_adapters(family: str) -> None:
    """Previews and proofs run without gradients; a proof also switches the adapter off."""
    plain, one = pair(family, adapted=False)
    fuse_rotary(one.model)
    with torch.no_grad():
        assert relative(one.predict(), plain.predict()) < ROUNDING


def fast(one: Case) -> Case:
    """The model that a run builds, compiled by a backend that makes no kernels of its graphs."""
    join_siblings(one.model, one.predict)
    fuse_head_norms(one.model)
    fuse_rotary(one.model)
    for module in one.model.modules():
        if type(module).__name__ in one.family.blocks:
            module.compile(fullgraph=True, backend="aot_eager")
    return one


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYERS)
def test_compiled_blocks_are_one_graph_a_kind(family: str) -> None:
    """The second of other sizes makes lengths symbols; a third one finds them."""
    plain, one = pair(family)
    for each in (plain, one):
        reach(each.model)
    fast(one)
    before = graphs_compiled()
    for _ in range(2):
        same(one, plain)
    assert graphs_compiled() - before == GRAPHS[family]
    counts = []
    for size in (96, 128) if family != "flux2_dev" else ():
        same(with_inputs(family, one.model, size), with_inputs(family, plain.model, size))
        counts.append(graphs_compiled())
    assert counts == counts[1:] * 2


@pytest.mark.parametrize("family", LAYERS)
def test_the_attention_kernel_stays_and_can_be_changed(family: str) -> None:
    model = made(family, adapted=False).model
    set_attention(model, "math")
    before = {name: one._attention_backend for name, one in model.attn_processors.items()}
    fuse_rotary(model)
    after = model.attn_processors
    assert {name: one._attention_backend for name, one in after.items()} == before
    set_attention(model, "efficient")
    assert {one._attention_backend for one in after.values()} == {KERNELS["efficient"].backend}


@pytest.mark.parametrize("masked", [False, True])
def test_a_mask_of_padded_text_is_kept(masked: bool) -> None:
    """Our previews pass no mask, but the pipeline could."""
    plain, one = pair("qwen_image")
    fuse_rotary(one.model)
    text = plain.batch.text["prompt_embeds"].repeat(2, 1, 1)
    mask = torch.ones(text.shape[:2], dtype=torch.long)
    mask[1, 9:] = 0
    torch.manual_seed(3)
    inputs = {
        "hidden_states": torch.randn(2, 12, 16),
        "timestep": torch.tensor([0.3, 0.8]),
        "encoder_hidden_states": text,
        "encoder_hidden_states_mask": mask if masked else None,
        "img_shapes": [[(1, 3, 4)]] * 2,
        "return_dict": False,
    }
    wanted, found = plain.model(**inputs)[0], one.model(**inputs)[0]
    assert relative(found, wanted) < ROUNDING
    whole = plain.model(**{**inputs, "encoder_hidden_states_mask": None})[0]
    assert (relative(found, whole) > 1e-3) == masked


@pytest.mark.parametrize("family", LAYERS)
def test_what_no_family_passes_is_refused(family: str) -> None:
    model = made(family, adapted=False).model
    fuse_rotary(model)
    name, processor = next(iter(model.attn_processors.items()))
    attention, tokens = model.get_submodule(name.removesuffix(".processor")), torch.randn(1, 4, 64)
    with pytest.raises(AssertionError):
        processor(attention, tokens, tokens, image_rotary_emb=None)
    with pytest.raises(AssertionError):
        processor(attention, tokens, None, image_rotary_emb=(torch.ones(4, 16), torch.ones(4, 16)))


# which layers


@pytest.mark.parametrize("family", ["kandinsky5", "llama", "qwen3"])
def test_models_of_other_attentions_are_left_alone(family: str) -> None:
    assert fuse_rotary(case(family).model) == 0


@pytest.mark.parametrize("family", LAYERS)
def test_a_width_that_is_no_power_of_two_is_left_alone(family: str) -> None:
    axes = (12, 12, 12, 12) if family == "flux2_dev" else (16, 16, 16)
    model = made(family, changes={"attention_head_dim": 48, "axes_dims_rope": axes}).model
    processors = dict(model.attn_processors)
    assert fuse_rotary(model) == 0
    assert model.attn_processors == processors


@pytest.mark.parametrize("name", ["norm_q", "norm_k"])
@pytest.mark.parametrize("change", ["trained", "eps", "other"])
def test_a_layer_with_another_norm_is_left_alone(name: str, change: str) -> None:
    model = made("flux1_dev").model
    attention = model.single_transformer_blocks[1].attn
    norm = attention.get_submodule(name)
    if change == "trained":
        norm.requires_grad_(True)
    elif change == "eps":
        norm.eps = 1e-3
    else:
        attention.register_module(name, torch.nn.LayerNorm(16).requires_grad_(False))
    assert fuse_rotary(model) == LAYERS["flux1_dev"] - 1


def test_a_norm_with_a_bias_is_left_alone() -> None:
    model = made("qwen_image").model
    norm = model.transformer_blocks[0].attn.norm_added_k
    norm.bias = torch.nn.Parameter(torch.ones(16), requires_grad=False)
    assert fuse_rotary(model) == 1


def test_another_processor_is_left_alone() -> None:
    model = made("flux2_dev").model
    model.transformer_blocks[0].attn.set_processor(Flux2KVAttnProcessor())
    assert fuse_rotary(model) == 2
