"""Norm and rotary embedding of heads on a GPU: kernels against the CPU, models against plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from tests.gpu.fast_models import DEVICE, SETTINGS, build, inputs, trainable
from tests.unit.modeling.small_models import adapt, difference, relative
from tests.unit.modeling.streams import Part, norm_rotary
from tests.unit.modeling.test_rotary import EPS, part
from trainer.families.flux1_dev import FLUX1_DEV
from trainer.families.qwen_image import QWEN_IMAGE
from trainer.families.values import Batch, Draw, Shape
from trainer.modeling.adapter.joined_lora import join_siblings
from trainer.modeling.attention.setting import set_attention
from trainer.modeling.blocks.compiled import compile_blocks
from trainer.modeling.blocks.recompute import repeated_blocks
from trainer.modeling.fused.norms import fuse_head_norms
from trainer.modeling.fused.rotary import fuse_rotary

pytestmark = pytest.mark.gpu

QWEN = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 128,
    "num_attention_heads": 6,
    "joint_attention_dim": 64,
    "axes_dims_rope": (16, 56, 56),
}


# kernels


def on_device(one: Part | None) -> Any:
    """With the same strides."""
    if one is None:
        return None
    copies = []
    for tensor in one:
        if tensor is None:
            copies.append(None)
            continue
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
        copies.append(copy.copy_(tensor))
    return tuple(copies)


def run(first: Part, second: Part | None, gradient: torch.Tensor) -> list[torch.Tensor]:
    """Output, and gradients of the parts' values, on the CPU."""
    parts = [(one[0].detach().requires_grad_(True), *one[1:]) for one in (first, second) if one is not None]
    output = norm_rotary(parts[0], parts[1] if second else None, EPS)
    output.backward(gradient)
    return [one.detach().cpu() for one in (output, *(values.grad for values, *_ in parts))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["real", "complex"])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("tokens", [(37, 0), (5, 70), (64, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_kernels_compute_what_the_cpu_does(
    dtype: torch.dtype, kind: str, width: int, tokens: tuple[int, int], turned: bool
) -> None:
    """Heads are views of a wide product; gradients come with heads before tokens or after them."""
    torch.manual_seed(0)
    first, second = (part(count, kind, width=width, dtype=dtype) if count else None for count in tokens)
    assert first is not None
    gradient = torch.randn(2, sum(tokens), 3, width).to(dtype)
    wanted = run(first, second, gradient)
    given = gradient.to(DEVICE)
    if turned:
        given = given.transpose(1, 2).contiguous().transpose(1, 2)
    found = run(on_device(first), on_device(second), given)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype and ours.is_contiguous()
        assert relative(ours, theirs) < (1e-5 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("kind", ["real", "complex"])
def test_heads_of_several_programs_are_each_their_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full-size model has more heads than one program of the kernel takes."""
    from trainer.modeling.triton import norm_rotary as kernels

    monkeypatch.setattr(kernels, "_MOST_HEADS", 1)
    test_kernels_compute_what_the_cpu_does(torch.float32, kind, 64, (5, 70), True)


def test_values_that_are_not_aligned_are_copied() -> None:
    torch.manual_seed(0)
    values, *rest = on_device(part(9, "real", width=64, dtype=torch.bfloat16))
    spread = torch.empty(2, 9, 3, 65, dtype=values.dtype, device=DEVICE)[..., 1:].copy_(values)
    wanted = norm_rotary((values, *rest), None, EPS)
    assert torch.equal(norm_rotary((spread, *rest), None, EPS), wanted)
    # a gradient of one value everywhere has no strides
    leaf = spread.detach().requires_grad_(True)
    norm_rotary((leaf, *rest), None, EPS).sum().backward()
    other = values.detach().clone().requires_grad_(True)
    norm_rotary((other, *rest), None, EPS).backward(torch.ones_like(other))
    assert torch.equal(leaf.grad, other.grad)


# models


def qwen() -> Any:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = QwenImageTransformer2DModel(**QWEN).to(torch.bfloat16)
    model.requires_grad_(False)
    adapt(model, QWEN_IMAGE.lora_targets["attention"], device=DEVICE)
    set_attention(model, "flash")
    return model.train()


def qwen_inputs() -> tuple[Batch, Draw]:
    shape = Shape(batch_size=1, width=512, height=512, text_tokens=77, bytes_per_value=2)
    batch = QWEN_IMAGE.synthetic_batch(QWEN, shape, seed=0)
    draw = QWEN_IMAGE.draw(SETTINGS, [0], {n: tuple(t.shape[1:]) for n, t in batch.latents.items()})
    latents = {name: tensor.to(DEVICE) for name, tensor in batch.latents.items()}
    text = {name: tensor.to(DEVICE, torch.bfloat16) for name, tensor in batch.text.items()}
    moved = Draw(**{name: tensor.to(DEVICE) for name, tensor in vars(draw).items()})
    return Batch(latents=latents, text=text, size=1, weight=1.0), moved


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["flux", "qwen"])
def test_a_fused_model_computes_what_the_plain_one_does(name: str, compiled: bool) -> None:
    family: Any = FLUX1_DEV if name == "flux" else QWEN_IMAGE
    batch, draw = inputs(0) if name == "flux" else qwen_inputs()
    results = []
    for is_fused in (False, True):
        model = build(fast=False) if name == "flux" else qwen()
        if is_fused:
            join_siblings(model, lambda model=model: family.predict(model, batch, draw, SETTINGS))
            fuse_head_norms(model)
            assert fuse_rotary(model) == (3 if name == "flux" else 2)
            if compiled:
                compile_blocks(repeated_blocks(model, family.blocks), activation_budget=1.0)
        with torch.no_grad():
            output = family.predict(model, batch, draw, SETTINGS)
        family.loss(model, batch, draw, SETTINGS).sum().backward()
        gradients = {n: one.grad for n, one in trainable(model).items() if one.grad is not None}
        results.append((output, gradients))
    (wanted_output, wanted), (output, found) = results
    assert relative(output, wanted_output) < 0.02
    # compiled, a layer that the output does not depend on has zeros
    assert not any(found.pop(name).any() for name in found.keys() - wanted.keys())
    assert difference(found, wanted) < 0.05


def test_nothing_complex_is_computed_in_compiled_blocks() -> None:
    model, (batch, draw) = qwen(), qwen_inputs()
    fuse_rotary(model)
    compile_blocks(repeated_blocks(model, QWEN_IMAGE.blocks), activation_budget=1.0)

    def step() -> None:
        QWEN_IMAGE.loss(model, batch, draw, SETTINGS).sum().backward()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    names = [event.key for event in profiler.key_averages()]
    assert any("norm_rotary_backward" in name for name in names)
    assert not [name for name in names if "complex" in name]
