"""Sizes that memory and time are predicted from: shapes of real tensors, and activations from the family."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from trainer.errors import AccessError
from trainer.files.component_shapes import Shapes, Stamp, header_shapes, stamp_of
from trainer.files.weight_files import weight_files
from trainer.planning.shapes.activations import Activations
from trainer.planning.shapes.mix import Captions

_T = TypeVar("_T")
Role = Literal["trained", "text_encoder", "vae"]
Size = tuple[int, int]
"""(out, in) of a linear layer."""
TABLES = Path(__file__).parent / "tables"
_BLOCK = re.compile(r"(.*?\b\w+\.\d+)\.")
"""Start of a tensor's name: the outermost numbered module that it is in."""
_ONE_INPUT = (
    re.compile(r"(?:to_)?(?:q|k|v|query|key|value)(?:_proj)?|proj_mlp"),
    re.compile(r"add_[qkv]_proj"),
    re.compile(r"(?:gate|up)_proj"),
)
"""Last names of linears that an attention, its text's side, or a gated MLP gives one input."""
_LEAST_LINEARS = 2
"""A numbered module with fewer linear layers is no block."""


@dataclass(frozen=True, kw_only=True)
class Linears:
    """Weights of some linear layers, in numbers."""

    parameters: int = 0
    rows: int = 0
    """Rows of their outputs."""
    largest: int = 0
    """Parameters of the largest."""

    def __add__(self, other: Linears) -> Linears:
        return Linears(
            parameters=self.parameters + other.parameters,
            rows=self.rows + other.rows,
            largest=max(self.largest, other.largest),
        )


NO_LINEARS = Linears()


def linears_of(sizes: Collection[Size]) -> Linears:
    """The numbers of weights (out, in)."""
    each = [math.prod(size) for size in sizes]
    return Linears(parameters=sum(each), rows=sum(rows for rows, _ in sizes), largest=max(each, default=0))


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Repeated blocks one after another, and the parameters of the largest of them."""

    name: str
    blocks: int
    quantized: Linears
    """Linear weights that a quantised base would hold quantised."""
    others: int
    """All other parameters of the block."""
    fp32: int
    """Parameters among the others that the model's class keeps in fp32."""
    modulation: Linears = NO_LINEARS
    """Linears among the others that int8 and nf4 bases quantise."""


@dataclass(frozen=True, kw_only=True)
class ComponentGeometry:
    """One component of a base model: every tensor's name and shape."""

    name: str
    role: Role
    shapes: Shapes
    source: str
    """Source of the shapes: safetensors headers, the committed table, or the meta device."""

    def __hash__(self) -> int:
        # plans are made of the same component again and again: what follows from its names is kept by it
        return hash((self.name, self.source))

    @functools.cached_property
    def parameters(self) -> int:
        """Number of elements over all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @functools.cached_property
    def linears(self) -> Mapping[str, Size]:
        """`linear_weights` of its shapes."""
        return linear_weights(self.shapes)


@functools.lru_cache(maxsize=64)
def parted(part: ComponentGeometry, patterns: tuple[str, ...]) -> tuple[dict[str, Size], dict[str, Size]]:
    """(its linears whose whole names match one of the patterns, the others), (out, in) by name."""
    others = quantized_linears(part.linears, patterns)
    return {name: size for name, size in part.linears.items() if name not in others}, others


def linear_weights(shapes: Shapes) -> dict[str, Size]:
    """(out, in) of every matrix by module name: linear layers in trained components, and the embedding of a
    language model.
    """
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }


def quantized_linears(linears: Mapping[str, Size], high_precision: Sequence[str]) -> dict[str, Size]:
    """The linears that a quantised base holds quantised: those whose names match no pattern as a whole."""
    kept = re.compile("|".join(f"(?:{pattern})" for pattern in high_precision) or "(?!)")
    return {name: size for name, size in linears.items() if not kept.fullmatch(name)}


@functools.lru_cache(maxsize=64)
def stacks(
    part: ComponentGeometry,
    high_precision: tuple[str, ...],
    modulation: tuple[str, ...] = (),
    kept_in_fp32: tuple[str, ...] = (),
) -> tuple[Stack, ...]:
    """All stacks of repeated blocks, the longest first: the order in which their blocks leave the device.

    Linears are named by patterns, as in `Family`; `kept_in_fp32` is as in `fp32_parameters`.
    """
    tensors, more = by_block(part.shapes), by_block(parted(part, modulation)[0])
    linears = by_block(parted(part, high_precision)[1], least=_LEAST_LINEARS)
    numbered: dict[str, list[str]] = {}
    for name in linears:
        numbered.setdefault(name.rpartition(".")[0], []).append(name)
    made = []
    for stack, members in numbered.items():
        sizes = {name: sum(map(math.prod, tensors[name].values())) for name in members}
        largest = max(members, key=sizes.__getitem__)
        own = linears_of(linears[largest].values())
        made.append(
            Stack(
                name=stack,
                blocks=len(members),
                quantized=own,
                others=sizes[largest] - own.parameters,
                fp32=fp32_parameters(tensors[largest], kept_in_fp32),
                modulation=linears_of(more.get(largest, {}).values()),
            )
        )
    return tuple(sorted(made, key=lambda one: (-one.blocks, one.name)))


def fp32_parameters(shapes: Shapes, kept: Iterable[str]) -> int:
    """Parameters of the tensors with one of these words in their names, which stay fp32 in a bf16 run."""
    words = frozenset(kept)
    return sum(math.prod(shape) for name, shape in shapes.items() if not words.isdisjoint(name.split(".")))


def by_block(named: Mapping[str, _T], *, least: int = 1) -> dict[str, dict[str, _T]]:
    """Values of the names that lie in a numbered module, by that module and by name, of modules with at
    least so many.
    """
    found: dict[str, dict[str, _T]] = {}
    for name, value in named.items():
        block = _BLOCK.match(name)
        if block is not None:
            found.setdefault(block[1], {})[name] = value
    return {block: inside for block, inside in found.items() if len(inside) >= least}


@functools.lru_cache(maxsize=64)
def linear_blocks(
    part: ComponentGeometry, high_precision: tuple[str, ...], aside: re.Pattern[str]
) -> tuple[tuple[int, int, int], ...]:
    """(parameters of linears whose names hold `aside`, of the others, linears) of each repeated block."""
    found = []
    for linears in by_block(parted(part, high_precision)[1], least=_LEAST_LINEARS).values():
        sizes = {name: math.prod(size) for name, size in linears.items()}
        textual = sum(size for name, size in sizes.items() if aside.search(name))
        found.append((textual, sum(sizes.values()) - textual, len(sizes)))
    return tuple(found)


def input_of(name: str) -> str:
    """A word that stands for the input of a block's linear of this name: linears that are given the same one
    have it in common, by what libraries call them.
    """
    parent, _, last = name.rpartition(".")
    if last == "proj_mlp":  # of a block that attends and feeds forward beside each other
        parent = f"{parent}.attn"
    if "cross" in parent and "query" in last:  # keys and values are of something else
        return name
    kinds = [number for number, pattern in enumerate(_ONE_INPUT) if pattern.fullmatch(last)]
    return f"{parent} {kinds[0]}" if kinds else name


@functools.lru_cache(maxsize=64)
def largest_product(part: ComponentGeometry, high_precision: tuple[str, ...]) -> tuple[int, int]:
    """(rows of the outputs, parameters) of linears that are given one input together, the most of each."""
    rows, sizes = Counter[str](), Counter[str]()
    for name, size in parted(part, high_precision)[1].items():
        rows[input_of(name)] += size[0]
        sizes[input_of(name)] += math.prod(size)
    return max(rows.values(), default=0), max(sizes.values(), default=0)


@functools.lru_cache(maxsize=64)
def linear_values(
    part: ComponentGeometry,
    high_precision: tuple[str, ...],
    aside: re.Pattern[str],
    *,
    every: int,
    text: int,
) -> tuple[int, int, int]:
    """(values that the blocks' linears read, values that they give, values that they read each for itself) in
    a pass over so many tokens, of which so many are text; linears whose names hold `aside` see these alone.
    Of those read, linears of one input read it once.
    """
    read = given = alone = 0
    for linears in by_block(parted(part, high_precision)[1], least=_LEAST_LINEARS).values():
        textual = {name for name in linears if aside.search(name)}
        others = every - text if textual else every
        inputs: dict[str, int] = {}
        for name, (outs, ins) in linears.items():
            tokens = text if name in textual else others
            inputs[input_of(name)] = tokens * ins
            given, alone = given + tokens * outs, alone + tokens * ins
        read += sum(inputs.values())
    return read, given, alone


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """One run's model in numbers: everything that `resolve` needs to know of it. See `run_geometry`."""

    components: tuple[ComponentGeometry, ...]
    lora_parameters: int
    """Parameters that the adapter adds for the run's rank and targets; 0 for `method: full`."""
    lora_layers: int = 0
    """Linear layers that have one."""
    quantized: Linears
    """Linear weights that a quantised base would hold quantised, or that are stored so."""
    activations: Activations
    activations_compiled: Activations
    """Activations with compiled blocks."""
    activations_fp8: Activations | None = None
    """Activations with compiled blocks whose trained weights multiply in FP8, where these were counted."""
    modulation: Linears = NO_LINEARS
    """Linears that int8 and nf4 bases hold quantised besides: see `Family.modulation`."""
    fp32_parameters: int = 0
    """Parameters that the model's class keeps in fp32 in a bf16 run."""
    matmul_flops: float = 0.0
    """FLOP of the blocks' linear layers in one forward pass, with captions of usual length."""
    attention_flops: float = 0.0
    """FLOP of attention in that pass."""
    attention_calls: int = 0
    """Calls of the kernel that `attention_shape_class` names, in that pass."""
    products: int = 0
    """Linear layers of the blocks."""
    linear_values: tuple[int, int, int] = (0, 0, 0)
    """Values that these read, linears of one input once; that they give; that they read each for itself, all
    in that pass.
    """
    widest_output: int = 0
    """Values of the largest output of those of one input, with the longest captions."""
    largest_product: int = 0
    """Parameters of the most that are given one input."""
    head_size: Size = (0, 0)
    """(words, width) of a language model's head; zeros where there is none."""
    head_tokens: int = 0
    """Tokens that pass through it in that pass."""
    usual_share: float = 1.0
    """Tokens of that pass, as a share of those with the longest captions."""
    usual_parts: Mapping[Captions, tuple[float, ...]] = field(default_factory=dict)
    """Micro-batches of one, two ... of its samples, on average, as their shapes differ, by how captions are
    taken; empty: it is one.
    """
    pictures_known: bool = False
    """Whether `usual_parts` come from the shapes of the run's pictures; else six shapes are assumed."""
    blocks: int = 0
    """Repeated blocks."""
    stacks: tuple[Stack, ...] = ()
    """Stacks of these blocks, the longest first."""
    text_bytes_peak: int = 0
    """Activations of the text encoders while caching, in bytes."""
    vae_bytes_peak: int = 0
    """Activations of the VAE for one image of the run, whole, in bytes."""
    vae_bytes_peak_tiled: int = 0
    """Activations of the VAE with tiling, in bytes."""
    attention_shape_class: str = ""
    """Key of the probe's verdicts on attention: heads, head width and tokens of the run."""
    matmul_shape_class: str = ""
    """Key of the verdicts on linear layers: tokens, rows and columns."""
    larger_controls: str = ""
    """Why control images are counted larger than their target, in words; empty where they are not."""
    captions_vary: bool = False
    """The family's encoder does not pad captions: each has a length of its own."""
    packed: bool = False
    """The family packs several samples into one row: rows differ in length from one to the next."""
    stored_as: str = ""
    """`nf4` where the checkpoint of the trained component is quantised already; nothing else can be read."""
    stored_bytes: int = 0
    """Bytes of its quantised weights with their scales, as they are in the files."""


@functools.cache
def table_component(family: str, name: str, role: Role) -> ComponentGeometry:
    """A component of the full-size model, by the committed table."""
    source = f"committed table of the full-size {family}"
    shapes = read_table(TABLES / f"{family}.json")[name]
    return ComponentGeometry(name=name, role=role, shapes=shapes, source=source)


def stored_component(folder: Path, name: str, role: Role, *, base: str = "") -> ComponentGeometry:
    """A component by the safetensors headers below `folder`; `base` is what the user called the folder.

    Raises AccessError for files that cannot be read and for a component without any.
    """
    source = f"safetensors headers of {base or folder}"
    found = _from_headers(stamp_of(weight_files(folder / name).files), name, role, source)
    if not found.shapes:
        raise AccessError(
            f"no weights for {name}",
            where=str(folder),
            remedy="the download may be incomplete: run `trainer fetch CONFIG` again",
        )
    return found


# plans are made of the same files again and again: what is read of a file stands until the file changes
@functools.lru_cache(maxsize=64)
def _from_headers(stamp: Stamp, name: str, role: Role, source: str) -> ComponentGeometry:
    shapes = header_shapes(file for file, _, _ in stamp)
    return ComponentGeometry(name=name, role=role, shapes=shapes, source=source)


@functools.cache
def read_table(path: Path) -> Mapping[str, Shapes]:
    """Shapes by component from a compact table: rows of (name with {i}, shape, count), or the words
    FAMILY/COMPONENT where they are those of the table of another family beside it.
    """
    found: dict[str, Shapes] = {}
    for component, rows in json.loads(path.read_text())["components"].items():
        if isinstance(rows, str):
            family, _, theirs = rows.partition("/")
            found[component] = read_table(path.with_name(f"{family}.json"))[theirs]
        else:
            found[component] = {
                pattern.replace("{i}", str(index)): tuple(shape)
                for pattern, shape, count in rows
                for index in range(count)
            }
    return found


@functools.cache
def kept_in_fp32(family: str) -> tuple[str, ...]:
    """Parts of tensor names that the class of the family's trained component keeps in fp32 always."""
    return tuple(json.loads((TABLES / f"{family}.json").read_text()).get("kept_in_fp32", ()))
