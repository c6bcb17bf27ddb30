"""Attention kernels in their layouts, eager and in one compiled graph; what a GPU does is in tests/gpu.

No CPU has cuDNN or the flash-attn packages: torch's math kernel, or a package of the same name that calls it,
stands in where the layout, the wiring and the tracing are tested.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.models import attention_dispatch
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

from trainer.modeling.attention import kernels as module
from trainer.modeling.attention import setting
from trainer.modeling.attention.kernels import SDPA_BACKENDS, attention
from trainer.modeling.attention.packed_rows import packed_attention
from trainer.modeling.attention.setting import set_attention

CUDNN = ("cudnn", "cudnn_strided")
PACKAGES = ("flash_attn_2", "flash_attn_3", "flash_attn_4")
SIZE = (2, 6, 4, 8)

# each with the arguments and the results of the real one
FAKES = {
    "flash_attn/__init__.py": """\
import torch


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, scale=softmax_scale, is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
""",
    "flash_attn/cute/__init__.py": "",
    "flash_attn/cute/interface.py": """\
import torch

from flash_attn import flash_attn_func


def _flash_attn_fwd(q, k, v, *, softmax_scale, causal, return_lse):
    output = flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal).contiguous()
    return output, q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _flash_attn_bwd(q, k, v, out, dout, lse, *, softmax_scale, causal):
    # by hand: inside an operator nothing is recorded for autograd
    groups, tokens = q.shape[2] // k.shape[2], q.shape[1]
    q, dout = q.transpose(1, 2), dout.transpose(1, 2)
    keys, values = (tensor.transpose(1, 2).repeat_interleave(groups, 1) for tensor in (k, v))
    scores = q @ keys.mT * softmax_scale
    if causal:
        scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    change = weights * (dout @ values.mT - (dout * (weights @ values)).sum(-1, keepdim=True)) * softmax_scale
    found = (change.mT @ q, weights.mT @ dout)
    dk, dv = (tensor.unflatten(1, (-1, groups)).sum(2).transpose(1, 2) for tensor in found)
    return (change @ keys).transpose(1, 2), dk, dv
""",
    "flash_attn_interface.py": """\
from flash_attn import flash_attn_func as _flash_attn_func


def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
    return _flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal), None
""",
}


@pytest.fixture(autouse=True)
def diffusers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo diffusers' table of kernels and its active kernel, which belong to the whole process."""
    registry = attention_dispatch._AttentionBackendRegistry
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    monkeypatch.setattr(registry, "_active_backend", registry._active_backend)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All three packages, importable."""
    for name, text in FAKES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")
    ]:
        del sys.modules[name]


@pytest.fixture
def cudnn_by_math(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CUDNN:
        monkeypatch.setitem(SDPA_BACKENDS, name, SDPBackend.MATH)


def tensors(size: tuple[int, ...] = SIZE, key_size: tuple[int, ...] | None = None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = (size, key_size or size, key_size or size)
    return [torch.randn(one, requires_grad=True) for one in sizes]


def block(kernel: str, causal: bool) -> Callable[..., torch.Tensor]:
    """Attention between pointwise work, as inside a model's block."""

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attention(query.tanh(), key, value, kernel, causal=causal).flatten(2, 3).sin()

    return run


def check(found: torch.Tensor, inputs: list[torch.Tensor], wanted: torch.Tensor) -> None:
    """Outputs and all gradients are equal."""
    upstream = torch.randn_like(wanted)
    pairs = zip(
        (found, *torch.autograd.grad(found, inputs, upstream)),
        (wanted, *torch.autograd.grad(wanted, inputs, upstream)),
        strict=True,
    )
    for number, (one, other) in enumerate(pairs):
        torch.testing.assert_close(
            one, other, rtol=1e-5, atol=1e-6, msg=lambda text, at=number: f"{at}: {text}"
        )


@pytest.mark.usefixtures("packages", "cudnn_by_math")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["math", *CUDNN, *PACKAGES])
def test_a_block_compiles_into_one_graph_and_equals_eager(kernel: str, causal: bool) -> None:
    inputs = tensors()
    torch.compiler.reset()
    compiled = torch.compile(block(kernel, causal), fullgraph=True, backend="aot_eager")
    check(compiled(*inputs), inputs, block("math", causal)(*inputs))


@pytest.mark.usefixtures("packages", "cudnn_by_math")
@pytest.mark.parametrize("kernel", ["math", *CUDNN, *PACKAGES])
def test_samples_in_one_row_with_fewer_keys_than_queries(kernel: str) -> None:
    inputs = tensors((1, 4, 7, 8), (1, 2, 7, 8))
    wanted = torch.cat(
        [
            torch.nn.functional.scaled_dot_product_attention(
                *part, is_causal=True, scale=0.5, enable_gqa=True
            )
            for part in zip(*(tensor.split([4, 1, 2], dim=2) for tensor in inputs), strict=True)
        ],
        dim=2,
    ).transpose(1, 2)
    check(packed_attention(*inputs, kernel, segments=(4, 1, 2), scale=0.5), inputs, wanted)


@pytest.mark.usefixtures("cudnn_by_math")
@pytest.mark.parametrize("kernel", CUDNN)
def test_cudnn_sees_one_layout_forward_and_backward(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads first in memory, or tokens first, whatever the caller's tensors and gradients are."""
    seen: list[tuple[int, ...]] = []

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: object) -> torch.Tensor:
        seen.extend(tensor.stride() for tensor in (query, key, value))
        # any function will do; as cuDNN does, the output is laid out as the query
        output = query + key + value
        assert output.stride() == query.stride()
        output.register_hook(lambda gradient: seen.append(gradient.stride()))
        return output

    monkeypatch.setattr(module, "scaled_dot_product_attention", watched)
    batch, tokens, heads, width = SIZE
    fused = torch.randn(batch, tokens, 3, heads, width, requires_grad=True)
    output = attention(*fused.unbind(2), kernel)
    # a gradient with heads first in memory for one, tokens first for the other
    size = (batch, heads, tokens, width) if kernel == "cudnn_strided" else SIZE
    upstream = torch.randn(size)
    output.backward(upstream.transpose(1, 2) if kernel == "cudnn_strided" else upstream)
    head_stride, token_stride = (tokens * width, width) if kernel == "cudnn" else (width, heads * width)
    assert seen == [(tokens * heads * width, head_stride, token_stride, 1)] * 4


@pytest.mark.usefixtures("packages", "cudnn_by_math")
@pytest.mark.parametrize(
    ("kernel", "kinds"),
    [
        pytest.param("math", ["single_transformer_blocks"], marks=pytest.mark.slow),
        pytest.param("cudnn", ["transformer_blocks"], marks=pytest.mark.slow),
        ("cudnn_strided", ["single_transformer_blocks"]),
        pytest.param(
            "flash_attn_4", ["transformer_blocks", "single_transformer_blocks"], marks=pytest.mark.slow
        ),
    ],
    ids=["math", *CUDNN, "flash_attn_4"],
)
def test_a_models_blocks_use_the_kernel_and_compile_into_one_graph(
    kernel: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds of blocks call attention through one processor."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(2, 2, 4),
    )
    arguments = {
        "hidden_states": torch.randn(1, 6, 4),
        "encoder_hidden_states": torch.randn(1, 3, 8),
        "pooled_projections": torch.randn(1, 8),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.rand(6, 3),
        "txt_ids": torch.zeros(3, 3),
    }
    parameters = list(model.parameters())
    set_attention(model, "native")
    wanted = model(**arguments).sample
    expected = torch.autograd.grad(wanted.square().sum(), parameters, allow_unused=True)
    set_attention(model, kernel)
    used: list[str] = []
    original = module.attend
    if kernel != "math":  # diffusers' own function of that name
        monkeypatch.setattr(
            module, "attend", lambda *all, **named: used.append(all[3]) or original(*all, **named)
        )
        model(**arguments)
        assert used == [kernel] * 2
        monkeypatch.setattr(module, "attend", original)
    torch.compiler.reset()
    for kind in kinds:
        model.get_submodule(kind)[0].compile(fullgraph=True, backend="aot_eager")
    found = model(**arguments).sample
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(found.square().sum(), parameters, allow_unused=True)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_an_option_that_no_family_uses_is_refused() -> None:
    query, key, value = tensors()
    with pytest.raises(AssertionError, match="cudnn_strided is not set up for"):
        setting._dispatched("cudnn_strided", query, key, value, is_causal=True)


@pytest.mark.usefixtures("packages")
def test_the_operations_of_the_fourth_are_counted() -> None:
    """A partitioner that thinks it free recomputes it first."""
    query, key, value = tensors((2, 6, 4, 8), (2, 10, 2, 8))
    with FlopCounterMode(display=False) as counted:
        attention(query, key, value, "flash_attn_4")
    # 2 multiply-adds a pair of tokens, head and value: for the scores, and for the sums
    assert counted.get_total_flops() == 2 * 2 * (2 * 4 * 6 * 10 * 8)


@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_operations_of_grouped_heads_are_counted(kernel: str) -> None:
    """The partitioner of compiled blocks asks for them; torch 2.11 refuses to count groups."""
    packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    query, key = (torch.empty(2, heads, 16, 32, device="meta") for heads in (8, 2))
    assert flop_registry[packet](query, key, key, out_val=None) == 2 * 2 * 8 * 16 * 16 * (32 + 32)
    plain = sdpa_flop_count(query.shape, query.shape, query.shape)
    assert flop_registry[packet](query, query, query, out_val=None) == plain
