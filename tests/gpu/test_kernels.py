"""Behaviour that only a GPU can show: kernels through the model, int8, bad steps."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxTransformer2DModel

from tests.quantized_layers import replaced
from trainer.config import environment
from trainer.config.schema import FlowSection, TrainSection
from trainer.engine.optimizing.updater import Updater
from trainer.engine.probing.probe import attention_kernels, matmul_kernels, probe
from trainer.families import draws
from trainer.families.flux1_dev import FLUX1_DEV
from trainer.families.values import AttentionShape, Batch, Draw, Shape
from trainer.machine.facts import KernelVerdict
from trainer.modeling.adapter import lora
from trainer.modeling.attention.kernels import attention
from trainer.modeling.attention.packed_rows import packed_attention, segments_for
from trainer.modeling.attention.setting import set_attention
from trainer.modeling.storage.layers import replacer
from trainer.ways.storages import find

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("kernels")]  # all kernels are measured once

CONFIG = {
    "in_channels": 64,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 256,
    "pooled_projection_dim": 128,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}
KERNELS = ("flash", "cudnn", "cudnn_strided", "flash_attn_2", "flash_attn_3", "flash_attn_4")
SETTINGS = draws.FlowSettings(
    sigmas=torch.linspace(1000, 1, 1000) / 1000,
    flow=FlowSection(),
    seed=0,
    scheduler={"use_dynamic_shifting": False},
)


def build(dtype: torch.dtype) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(**CONFIG).to("cuda", dtype)


def inputs(dtype: torch.dtype, side: int = 1024) -> tuple[Batch, Draw]:
    shape = Shape(batch_size=1, width=side, height=side, text_tokens=512, bytes_per_value=2)
    batch = FLUX1_DEV.synthetic_batch(CONFIG, shape, seed=1)
    header = {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}
    draw = FLUX1_DEV.draw(SETTINGS, [0], header)
    moved = {name: tensor.cuda() for name, tensor in vars(draw).items()}
    text = {name: tensor.to("cuda", dtype) for name, tensor in batch.text.items()}
    latents = {name: tensor.cuda() for name, tensor in batch.latents.items()}
    return Batch(latents=latents, text=text, size=1, weight=1.0), Draw(**moved)


def gradients(model: FluxTransformer2DModel, dtype: torch.dtype) -> torch.Tensor:
    """Gradients of all trainable parameters of one step, one long vector."""
    batch, draw = inputs(dtype)
    FLUX1_DEV.loss(model, batch, draw, SETTINGS).mean().backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([gradient.float().flatten() for gradient in found])


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float(((left - right).norm() / right.norm()).item())


@pytest.fixture(scope="module")
def verdicts() -> dict[str, KernelVerdict]:
    """All kernels at the shape of `inputs`: one that crashes would take these tests with it."""
    shape = AttentionShape(batch_size=1, heads=24, head_width=128, tokens=4608)
    found: dict[str, KernelVerdict] = {}
    # as more than one start of `trainer train`, where the time of one does not suffice
    while missing := [name for name in (*attention_kernels(), *matmul_kernels()) if name not in found]:
        measured = probe(missing, shape, "bf16", environment.snapshot())
        assert not measured.unsettled, measured.unsettled
        found |= {one.kernel: one for one in measured.verdicts}
    for one in found.values():
        print(one)
    return found


def require(kernel: str, verdicts: dict[str, KernelVerdict]) -> None:
    """Goes on with what the probe saw working; torch's own two must."""
    verdict = verdicts[f"attention.{kernel}"]
    assert verdict.works or kernel not in ("flash", "cudnn"), verdict.reason
    if not verdict.works:
        pytest.skip(verdict.reason)


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    """Gradients in float32."""
    model = build(torch.float32).requires_grad_(True)
    set_attention(model, "math")
    return gradients(model, torch.float32)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_through_the_model_agree_with_fp32(
    kernel: str, compiled: bool, verdicts: dict[str, KernelVerdict], reference: torch.Tensor
) -> None:
    """At 4,608 tokens, where diffusers' own layout crashes cuDNN's backward on torch 2.11."""
    require(kernel, verdicts)
    model = build(torch.bfloat16).requires_grad_(True)
    set_attention(model, kernel)
    if compiled:
        torch.compiler.reset()
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):
            block.compile(fullgraph=True)
    assert difference(gradients(model, torch.bfloat16), reference) < 0.03


@pytest.mark.parametrize("kernel", [*KERNELS, "efficient"])
def test_packed_attention_agrees_with_fp32(kernel: str, verdicts: dict[str, KernelVerdict]) -> None:
    """Two conversations in one row, eight key heads for 32 query heads."""
    require(kernel, verdicts)
    torch.manual_seed(0)
    shapes = ((1, 32, 640, 128), (1, 8, 640, 128), (1, 8, 640, 128))
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    results = []
    for name, dtype in (("math", torch.float32), (kernel, torch.bfloat16)):
        inputs = [tensor.detach().to(dtype).requires_grad_(True) for tensor in tensors]
        segments = segments_for(name, (384, 256), "cuda")
        output = packed_attention(*inputs, name, segments=segments)
        output.sin().sum().backward()
        results.append([output, *(one.grad for one in inputs)])
    for wanted, found in zip(*results, strict=True):
        assert difference(found.float(), wanted) < 0.02


@pytest.mark.parametrize("kernel", ["cudnn", "cudnn_strided"])
def test_one_key_is_the_answer_to_every_query(kernel: str) -> None:
    query, key = (torch.randn(1, tokens, 4, 64, device="cuda", dtype=torch.bfloat16) for tokens in (9, 1))
    value = torch.randn_like(key)
    found = attention(query, key, value, kernel)
    assert difference(found.float(), attention(query, key, value, "math").float()) < 0.01


def test_the_probe_finds_kernels_that_work(verdicts: dict[str, KernelVerdict]) -> None:
    assert set(verdicts) == {*attention_kernels(), *matmul_kernels()}
    assert verdicts["attention.flash"].works
    assert verdicts["attention.math"].works
    assert all(v.milliseconds is not None for v in verdicts.values() if v.works)


def test_the_probe_finds_matmuls_that_work(verdicts: dict[str, KernelVerdict]) -> None:
    assert verdicts["matmul.bf16"].works, verdicts["matmul.bf16"].reason
    if torch.cuda.get_device_capability() >= (8, 9):
        assert verdicts["matmul.fp8"].works, verdicts["matmul.fp8"].reason
    assert verdicts["matmul.int8"].works, verdicts["matmul.int8"].reason


def test_the_probe_reports_a_kernel_that_refuses_the_type() -> None:
    shape = AttentionShape(batch_size=1, heads=4, head_width=64, tokens=256)
    (verdict,) = probe(["attention.flash"], shape, "fp32", environment.snapshot()).verdicts
    assert not verdict.works
    assert verdict.reason


def test_int8_base_gives_nearly_the_same_adapter_gradients() -> None:
    found = []
    for quantized in (False, True):
        model = build(torch.bfloat16)
        if quantized:
            replace = replacer(find("int8"), FLUX1_DEV.high_precision)
            for name in lora.linear_names(model):
                parent, _, attribute = name.rpartition(".")
                new = replaced(replace, name, model.get_submodule(name))
                if new is not None:
                    model.get_submodule(parent).register_module(attribute, new)
        pattern = FLUX1_DEV.lora_targets["attention"]
        lora.add_lora(model, rank=4, alpha=4, pattern=pattern, seed=0, device="cuda:0")
        set_attention(model, "flash")
        found.append(gradients(model.train(), torch.bfloat16))
    assert difference(found[1], found[0]) < 0.1


@pytest.mark.parametrize("kind", ["adamw_fused_fp32", "adamw_split_bf16"])
def test_a_bad_step_changes_nothing_on_the_gpu(kind: str) -> None:
    held = {"w": torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16, device="cuda"))}
    updater = Updater(held, TrainSection(), kind)
    held["w"].grad = torch.full_like(held["w"], float("nan"))
    updater.accumulate()
    _, bad = updater.step(1e-3, torch.tensor(1.0, device="cuda"))
    assert bad.item() == 1.0
    assert torch.equal(held["w"], torch.ones_like(held["w"]))
