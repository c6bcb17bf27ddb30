"""Every number of rows from 1 to 1,100, at the widths of all families: FP8 products and Triton kernels.

Captions have any number of tokens. Rows do not depend on each other: one reference of all of them, in fp32
and of the dequantised values, serves every number. Nothing is copied to the host before all were computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb

from bench.rows import Weight, weights
from tests.quantized_layers import from_linear
from tests.unit.modeling.streams import norm_rotary, wide_norm_rotary
from trainer import families
from trainer.modeling.adapter.low_rank import add_low_rank
from trainer.modeling.fused.feedforward import (
    fp8_feed_forward,
    gelu_backward_quantize_rows,
    gelu_quantize_rows,
)
from trainer.modeling.fused.norms import head_norm
from trainer.modeling.storage import fp8_product

pytestmark = pytest.mark.gpu

MOST = 1100
EDGES = [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 1023, 1025]
DEVICE = "cuda"
EPS = 1e-6
WEIGHTS: list[Weight] = sorted({size for name in families.names() for size in weights(name)})
# (columns beside GELU, columns of GELU): feed-forwards, and FLUX.1's blocks of one stream
ACTIVATED = [(0, 10240), (0, 12288), (3072, 12288), (0, 18432)]
# (heads, width) of queries, of FLUX.1 and Qwen-Image, FLUX.2, Kandinsky
HEADS = [(24, 128), (48, 128), (20, 128)]

Call = Callable[[int], Iterable[torch.Tensor]]


@pytest.fixture(autouse=True)
def exact() -> None:
    """References multiply in fp32, not in TF32."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def agree(
    call: Call, wanted: Call, *, relative: float, absolute: float, counts: Iterable[int] = range(1, MOST + 1)
) -> None:
    """Every value of `call(rows)` is that of `wanted(rows)` to a share of itself and one of its row's rms."""
    worst, refused = {}, {}
    for rows in counts:
        try:
            found = list(call(rows))
        except RuntimeError as error:
            refused[rows] = str(error).splitlines()[0]
            continue
        excess = []
        for one, exactly in zip(found, wanted(rows), strict=True):
            assert one.shape == exactly.shape, (rows, one.shape, exactly.shape)
            difference = (one.float() - exactly).abs_().sub_(exactly.abs(), alpha=relative)
            rms = exactly.square().mean(-1, keepdim=True).sqrt_().add_(1e-30)
            excess.append(difference.div_(rms).max())
        worst[rows] = torch.stack(excess).max()
    assert not refused, f"{len(refused)} numbers of rows are refused: {refused}"
    values = torch.stack(list(worst.values())).cpu()
    print(f"at most {values.max():.4f} of a row's rms beyond {relative} of the value")
    # a value that is not finite is not within it either
    wrong = [rows for rows, value in zip(worst, values.tolist(), strict=True) if not value <= absolute]
    assert not wrong, f"wrong for {wrong}"


def pad_is_zero(quantized: torch.Tensor, scale: torch.Tensor, rows: int) -> None:
    assert len(quantized) == len(scale) == fp8_product.padded_rows(rows)
    assert not quantized[rows:].view(torch.uint8).any() and (scale[rows:] == 1).all()


def dequantized(quantized: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return quantized.float() * scale


def layer(size: Weight, *, biased: bool = True) -> Any:
    """An FP8 layer with two copies of its weight, and that weight in fp32."""
    out, inner = size
    linear = torch.nn.Linear(inner, out, bias=biased, device=DEVICE, dtype=torch.bfloat16)
    made: Any = from_linear(linear.requires_grad_(False), "fp8", fp8_compute=True, copies=2)
    return made, dequantized(made.weight.view(torch.float8_e4m3fn), made.weight_scale)


def step(
    compute: Callable[..., torch.Tensor], given: torch.Tensor, *leaves: torch.Tensor
) -> list[torch.Tensor]:
    """The output, and the gradient of each of `leaves`."""
    own = [leaf.detach().requires_grad_() for leaf in leaves]
    output = compute(*own)
    return [output.detach(), *torch.autograd.grad(output, own, given)]


# products


def product(summed: int) -> dict[str, Any]:
    """Hopper's tensor cores sum 32 products at a time and keep 13 bits behind the point of each sum."""
    return {"relative": 0.02, "absolute": 0.05 + summed / 32 * 2**-13}


@pytest.mark.parametrize("size", WEIGHTS, ids=lambda size: f"{size[0]}x{size[1]}")
def test_products_and_gradients_of_every_number_of_rows(size: Weight) -> None:
    made, weight = layer(size)
    inputs, given = randn(MOST, size[1]), randn(MOST, size[0])
    left = dequantized(*fp8_product.quantize_rows(inputs))
    output = left @ weight.t() + made.bias.float()
    # the gradient is quantised with the weight's scales in it, and multiplied by the values without them
    across = made.weight_scale.view(-1)
    values = made.weight.view(torch.float8_e4m3fn).float()
    gradient = dequantized(*fp8_product.quantize_rows(given, across)) @ values
    agree(
        lambda rows: step(made, given[:rows], inputs[:rows]),
        lambda rows: (output[:rows], gradient[:rows]),
        **product(max(size)),
    )


@pytest.mark.parametrize("storage", ["one copy", "no bias"])
def test_products_without_the_copy_or_the_bias(storage: str) -> None:
    made, weight = layer((12288, 3072), biased=storage != "no bias")
    if storage == "one copy":
        made.transposed = None
    inputs, given = randn(MOST, 3072), randn(MOST, 12288)
    output = dequantized(*fp8_product.quantize_rows(inputs)) @ weight.t()
    if made.bias is not None:
        output += made.bias.float()
    values = made.weight.view(torch.float8_e4m3fn).float()
    gradient = dequantized(*fp8_product.quantize_rows(given, made.weight_scale.view(-1))) @ values
    agree(
        lambda rows: step(made, given[:rows], inputs[:rows]),
        lambda rows: (output[:rows], gradient[:rows]),
        counts=[*EDGES, *range(1, MOST, 37)],
        **product(12288),
    )


@pytest.mark.parametrize("widths", [(0, 3072, 12288), (3072, 3072, 12288), (0, 2560, 10240)], ids=str)
def test_feed_forwards_of_every_number_of_rows(widths: tuple[int, int, int]) -> None:
    """Against all rows at once: their kernels and products are compared with torch by the other tests."""
    beside, width, hidden = widths
    up, down = layer((hidden, width))[0], layer((width, beside + hidden))[0]
    inputs, given = randn(MOST, width), randn(MOST, width)
    left = [randn(MOST, beside)] if beside else []

    def run(rows: int) -> list[torch.Tensor]:
        leaves = [one[:rows] for one in (inputs, *left)]
        return step(lambda x, *other: fp8_feed_forward(x, up, down, *other), given[:rows], *leaves)

    whole = [one.float() for one in run(MOST)]
    # other numbers of rows are summed in other orders, and a value may fall to the next step of e4m3
    agree(run, lambda rows: (one[:rows] for one in whole), relative=0.05, absolute=0.25)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_products_of_any_number_of_rows(dynamic: bool) -> None:
    made, weight = layer((1024, 512))
    inputs, given = randn(MOST, 512), randn(MOST, 1024)
    output = dequantized(*fp8_product.quantize_rows(inputs)) @ weight.t() + made.bias.float()
    values = made.weight.view(torch.float8_e4m3fn).float()
    gradient = dequantized(*fp8_product.quantize_rows(given, made.weight_scale.view(-1))) @ values
    compiled: Any = torch.compile(made, fullgraph=True, dynamic=dynamic)
    agree(
        lambda rows: step(compiled, given[:rows], inputs[:rows]),
        lambda rows: (output[:rows], gradient[:rows]),
        counts=[*EDGES, *range(18, 500, 13)] if dynamic else [1, 5, 16, 37],
        **product(1024),
    )


@pytest.mark.parametrize("rows", [1, 5, 16, 37, 129])
def test_products_in_a_graph_are_those_without(rows: int) -> None:
    first, up, down = (layer(size)[0] for size in ((256, 256), (1024, 256), (256, 1024)))
    fp8_product.keep_ones(DEVICE)
    inputs, given = randn(rows, 256), randn(rows, 256)

    def run() -> list[torch.Tensor]:
        return step(lambda x: fp8_feed_forward(first(x), up, down), given, inputs)

    wanted = [one.clone() for one in run()]
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.autograd.set_multithreading_enabled(False):
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = run()
    for one in found:
        one.zero_()
    graph.replay()
    for one, exactly in zip(found, wanted, strict=True):
        assert torch.equal(one, exactly)


# kernels that quantise: half of a step of e4m3 is up to 1/16 of a value, and some round to bf16 before
ROUNDED: dict[str, Any] = {"relative": 0.07, "absolute": 0.02}


@pytest.mark.parametrize("columns", sorted({one for size in WEIGHTS for one in size}))
def test_rows_are_quantised_for_every_number_of_them(columns: int) -> None:
    values, across = randn(MOST, columns), torch.rand(columns, device=DEVICE) + 0.5

    def run(rows: int, scale: torch.Tensor | None) -> torch.Tensor:
        quantized, row_scale = fp8_product.quantize_rows(values[:rows], scale, pad=True)
        if rows in EDGES:
            pad_is_zero(quantized, row_scale, rows)
        return dequantized(quantized, row_scale)[:rows]

    agree(
        lambda rows: (run(rows, None), run(rows, across)),
        lambda rows: (values[:rows].float(), values[:rows].float() * across),
        **ROUNDED,
    )


@pytest.mark.parametrize("widths", ACTIVATED, ids=str)
def test_activations_are_quantised_for_every_number_of_rows(widths: tuple[int, int]) -> None:
    beside, columns = widths
    # parts of wider rows, as they are in a block
    wide = randn(MOST, beside + columns + 16)
    values = wide[:, beside : beside + columns]
    left = randn(MOST, beside) if beside else None
    given, across = randn(MOST, beside + columns)[:, beside:], torch.rand(columns, device=DEVICE) + 0.5
    leaf = values.float().requires_grad_()
    active = torch.nn.functional.gelu(leaf, approximate="tanh")
    (slope,) = torch.autograd.grad(active, leaf, given.float())
    forward = active.detach() if left is None else torch.cat([left.float(), active.detach()], 1)
    backward = slope * across

    def run(rows: int) -> list[torch.Tensor]:
        found = [
            gelu_quantize_rows(None if left is None else left[:rows], values[:rows]),
            gelu_backward_quantize_rows(given[:rows], values[:rows], across),
        ]
        if rows in EDGES:
            for one in found:
                pad_is_zero(*one, rows)
        return [dequantized(*one)[:rows] for one in found]

    agree(run, lambda rows: (forward[:rows], backward[:rows]), **ROUNDED)


# kernels of heads


def bf16(**changes: float) -> dict[str, Any]:
    return {"relative": 0.01, "absolute": 0.02, **changes}


def tables(tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each number twice, as diffusers' rotary embedding makes them."""
    angles = torch.rand(tokens, width // 2, device=DEVICE) * 6.3
    return angles.cos().repeat_interleave(2, 1), angles.sin().repeat_interleave(2, 1)


def turned(values: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """torch's norm and diffusers' rotation of (1, tokens, heads, width) in fp32."""
    normed = torch.nn.functional.rms_norm(values, (values.shape[-1],), weight.float(), EPS)
    found: torch.Tensor = apply_rotary_emb(normed, (cos, sin), sequence_dim=1)
    return found


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_norms_of_every_number_of_tokens(heads: tuple[int, int]) -> None:
    count, width = heads
    weight = randn(width)
    # the keys of a joint product
    values, given = randn(1, MOST, 3 * count, width)[:, :, count : 2 * count], randn(1, MOST, count, width)
    wanted = step(
        lambda x: torch.nn.functional.rms_norm(x, (width,), weight.float(), EPS),
        given.float(),
        values.float(),
    )
    agree(
        lambda rows: step(lambda x: head_norm(x, weight, EPS), given[:, :rows], values[:, :rows]),
        lambda rows: (one[:, :rows] for one in wanted),
        **bf16(),
    )


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("joined", [False, True])
def test_rotated_heads_of_every_number_of_tokens(heads: tuple[int, int], joined: bool) -> None:
    """Heads of text alone, and of text before an image's tokens."""
    (count, width), beside = heads, 77
    weights = {"text": randn(width), "image": randn(width)}
    turns = {"text": tables(MOST, width), "image": tables(beside, width)}
    values = {"text": randn(1, MOST, count, width), "image": randn(1, beside, count, width)}
    given = {name: randn(*one.shape) for name, one in values.items()}
    exact = {
        name: step(
            lambda x, name=name: turned(x, weights[name], *turns[name]),
            given[name].float(),
            values[name].float(),
        )
        for name in values
    }

    def run(rows: int) -> list[torch.Tensor]:
        text = (weights["text"], *(table[:rows] for table in turns["text"]))
        own = values["text"][:, :rows]
        if not joined:
            return step(lambda x: norm_rotary((x, *text), None, EPS), given["text"][:, :rows], own)
        image = (weights["image"], *turns["image"])
        both = torch.cat([given["text"][:, :rows], given["image"]], 1)
        return step(lambda x, y: norm_rotary((x, *text), (y, *image), EPS), both, own, values["image"])

    def wanted(rows: int) -> Iterable[torch.Tensor]:
        output, gradient = (one[:, :rows] for one in exact["text"])
        if not joined:
            return output, gradient
        return torch.cat([output, exact["image"][0]], 1), gradient, exact["image"][1]

    agree(run, wanted, **bf16())


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("rank", [0, 4, 16])
def test_joint_products_of_every_number_of_tokens(heads: tuple[int, int], rank: int) -> None:
    """Queries, keys and values of text beside an image's, with products of low rank added on the way."""
    count, width = heads
    tokens = {"text": MOST, "image": 77}
    norms = {name: (randn(width), randn(width)) for name in tokens}
    turns = {name: tables(length, width) for name, length in tokens.items()}
    wide = {name: randn(1, length, 3 * count * width) for name, length in tokens.items()}
    hidden = {name: randn(1, length, 3 * rank) for name, length in tokens.items()} if rank else {}
    ups = {name: tuple(randn(count * width, rank) / rank**0.5 for _ in range(3)) for name in hidden}
    given = [randn(1, MOST + 77, count, width) for _ in range(3)]
    sides = {"text": [one[:, :MOST] for one in given], "image": [one[:, MOST:] for one in given]}

    def exact_side(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Queries, keys and values in fp32, and gradients of the product and of `hidden`."""
        leaves = [one[name].float().requires_grad_() for one in (wide, *([hidden] if rank else []))]
        product = leaves[0]
        if rank:
            added = [
                left @ up.float().t() for left, up in zip(leaves[1].chunk(3, -1), ups[name], strict=True)
            ]
            product = product + torch.cat(added, -1)
        query, key, value = product.unflatten(-1, (3, count, width)).unbind(2)
        found = [
            turned(query, norms[name][0], *turns[name]),
            turned(key, norms[name][1], *turns[name]),
            value,
        ]
        gradients = torch.autograd.grad(found, leaves, [one.float() for one in sides[name]])
        return [one.detach() for one in found], list(gradients)

    text, image = exact_side("text"), exact_side("image")

    def run(rows: int) -> list[torch.Tensor]:
        leaves = [wide["text"][:, :rows], wide["image"]]
        leaves += [hidden["text"][:, :rows], hidden["image"]] if rank else []
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        cos, sin = (table[:rows] for table in turns["text"])
        added: Any = ((leaves[2], ups["text"]), (leaves[3], ups["image"])) if rank else None
        first = (leaves[0], *norms["text"], cos, sin)
        found = wide_norm_rotary(first, (leaves[1], *norms["image"], *turns["image"]), EPS, added)
        both = [torch.cat([one[:, :rows], one[:, MOST:]], 1) for one in given]
        return [*(one.detach() for one in found), *torch.autograd.grad(found, leaves, both)]

    def wanted(rows: int) -> Iterable[torch.Tensor]:
        outputs = [torch.cat([one[:, :rows], other], 1) for one, other in zip(text[0], image[0], strict=True)]
        pairs = [[one[:, :rows], other] for one, other in zip(text[1], image[1], strict=True)]
        return [*outputs, *(one for pair in pairs for one in pair)]

    agree(run, wanted, **bf16(absolute=0.05))


# what is left


@pytest.mark.parametrize("columns", [2560, 3072, 9216, 18432])
def test_low_rank_sums_of_every_number_of_rows(columns: int) -> None:
    rank = 16
    whole, hidden, up = randn(MOST, columns), randn(MOST, rank), randn(columns, rank)
    wanted = whole.float() + hidden.float() @ up.float().t()
    agree(
        lambda rows: [add_low_rank(whole[:rows], hidden[:rows], up)],
        lambda rows: [wanted[:rows]],
        **bf16(),
    )


def test_bytes_of_every_number_of_rows() -> None:
    """Transposed, and unpacked from int8."""
    # Triton is not where torch was built for a CPU, and this file is read there too
    from trainer.modeling.triton import fp8_rows

    columns = 3072
    stored = torch.randint(-127, 128, (MOST, columns), device=DEVICE, dtype=torch.int8)
    scale = torch.rand(MOST, 1, device=DEVICE)
    wanted = stored.float() * scale
    agree(
        lambda rows: [
            fp8_rows.transpose_bytes(stored[:rows].view(torch.uint8)).view(torch.int8).t(),
            fp8_rows.unpack_rows(stored[:rows], scale[:rows], torch.bfloat16),
        ],
        lambda rows: [stored[:rows].float(), wanted[:rows]],
        relative=2**-8,
        absolute=1e-6,
    )
