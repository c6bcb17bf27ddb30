"""Find the numbers of rows that `torch._scaled_mm` refuses on this GPU, by the weights of the families.

python -m bench rows
python -m bench rows --most 256 --multiples 16,32

Products with a scale a row, without padding: cuBLAS refuses some with CUBLAS_STATUS_NOT_SUPPORTED.
`trainer.modeling.storage.fp8_product.ROW_MULTIPLE` must be a multiple that is never refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from bench import arguments as types
from trainer import families
from trainer.errors import HardwareError
from trainer.modeling.storage.fp8_product import ROW_MULTIPLE
from trainer.planning.shapes.geometry import TABLES, linear_weights, quantized_linears, read_table

Weight = tuple[int, int]
"""(out, in)."""

# queries, keys and values of one stream, whatever a family calls them
_JOINED = re.compile(r"(.*\.(?:to_|add_)?)(?:q|k|v|query|key|value)((?:_proj)?)")
_KEY_OR_VALUE = re.compile(r".*\.(?:to_|add_)?(?:k|v|key|value)(?:_proj)?")
_GATE_OR_UP = re.compile(r"(.*\.)(?:gate|up)_proj")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print for every product, forward and backward, the numbers of rows that are refused."""
    parser = types.command_parser("rows", __doc__)
    add = parser.add_argument
    add("--most", type=types.positive, default=1100, help="rows are 1 to this; 1100")
    add("--multiples", type=types.counts, default=(8, 16, 32, 64, 128), help="judged apart: 8,16,32,64,128")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise HardwareError("no CUDA device", where="bench rows", remedy="run it where a GPU is visible")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, rows are padded to {ROW_MULTIPLE}")
    print(f"{'out x in':>16} {'bias':>5}  refused of 1 to {options.most}; {options.multiples}")
    for out, inner in products():
        for biased in (False, True):
            found = refused(out, inner, range(1, options.most + 1), biased=biased)
            left = [str(one) for one in options.multiples if not any(rows % one == 0 for rows in found)]
            never = f"never a multiple of {', '.join(left) or 'any of these'}"
            taken = never if found else "none refused"
            print(
                f"{out:>8} x {inner:<5} {'yes' if biased else 'no':>5}  {spans(found)}; {taken}", flush=True
            )
    return 0


def weights(family: str) -> set[Weight]:
    """Weights that FP8 multiplies with in the full-size model: of single layers, and of joined ones."""
    own = families.get(family)
    shapes = read_table(TABLES / f"{family}.json")[own.trained_component]
    single = quantized_linears(linear_weights(shapes), own.high_precision)
    joined: dict[str, list[Weight]] = {}
    for name, size in single.items():
        for kind, pattern in (("qkv", _JOINED), ("kv", _KEY_OR_VALUE), ("gated", _GATE_OR_UP)):
            found = pattern.fullmatch(name)
            if found is not None:
                prefix = found[1] if found.groups() else name.rpartition(".")[0] + str("add_" in name)
                joined.setdefault(f"{kind} {prefix}", []).append(size)
    together = {(sum(out for out, _ in sizes), sizes[0][1]) for sizes in joined.values()}
    return {*single.values(), *together}


def products(names: Iterable[str] = families.names()) -> list[Weight]:
    """(N, K) of the products of those families, forward and backward, sorted."""
    forward = {size for name in names for size in weights(name)}
    return sorted(forward | {(inner, out) for out, inner in forward})


def refused(out: int, inner: int, counts: Iterable[int], *, biased: bool) -> list[int]:
    """The numbers of rows out of `counts` whose product with a weight (out, inner) raises."""
    counts = list(counts)
    left = torch.ones((max(counts), inner), device="cuda").to(torch.float8_e4m3fn)
    right = torch.ones((out, inner), device="cuda").to(torch.float8_e4m3fn).t()
    rows_scale = torch.ones((max(counts), 1), device="cuda")
    columns_scale = torch.ones((1, out), device="cuda")
    bias = torch.zeros(out, device="cuda", dtype=torch.bfloat16) if biased else None
    found = []
    for rows in counts:
        try:
            torch._scaled_mm(
                left[:rows],
                right,
                rows_scale[:rows],
                columns_scale,
                bias=bias,
                out_dtype=torch.bfloat16,
                use_fast_accum=True,
            )
        except RuntimeError:
            found.append(rows)
    torch.cuda.synchronize()
    return found


def spans(numbers: Sequence[int]) -> str:
    """Sorted numbers as 1-15, 17, 19-31; runs of equal steps as 1-15 step 2."""
    found: list[list[int]] = []  # first, last, step
    for number in numbers:
        last = found[-1] if found else None
        if last is not None and (last[0] == last[1] or number - last[1] == last[2]):
            last[1:] = number, number - last[1] if last[0] == last[1] else last[2]
        else:
            found.append([number, number, 1])
    return ", ".join(
        str(first) if first == last else f"{first}-{last}{'' if step == 1 else f' step {step}'}"
        for first, last, step in found
    )
