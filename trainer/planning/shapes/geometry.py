"""What memory is computed from: parameters from real tensors, activations from the family."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from trainer.errors import AccessError
from trainer.files.component_shapes import Shapes, Stamp, shapes_in, stamp_of
from trainer.files.weight_files import weight_files
from trainer.planning.shapes.activations import Activations
from trainer.planning.shapes.blocks import NO_LINEARS, Linears, Stack, stacks

Role = Literal["trained", "text_encoder", "vae"]
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class ComponentGeometry:
    """One component of a base model: every tensor's name and shape."""

    name: str
    role: Role
    shapes: Shapes
    source: str
    """Where the shapes came from: safetensors headers, the committed table, or the meta device."""

    @functools.cached_property
    def parameters(self) -> int:
        """Number of elements over all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @functools.cached_property
    def linears(self) -> Mapping[str, tuple[int, int]]:
        """`linear_weights` of its shapes."""
        return linear_weights(self.shapes)

    def quantized(self, high_precision: Sequence[str]) -> Mapping[str, tuple[int, int]]:
        """`quantized_linears` of its shapes."""
        return self._known(tuple(high_precision), lambda: quantized_linears(self.linears, high_precision))

    def matching(self, patterns: Sequence[str]) -> Mapping[str, tuple[int, int]]:
        """Its linears, (out, in) by name, whose whole names match one of the patterns."""

        def make() -> dict[str, tuple[int, int]]:
            found = _matching(tuple(self.linears), "|".join(f"(?:{pattern})" for pattern in patterns))
            return {name: size for name, size in self.linears.items() if name in found}

        return self._known(("matching", *patterns), make)

    def stacks(
        self, high_precision: Sequence[str], modulation: Sequence[str], kept_in_fp32: Sequence[str]
    ) -> tuple[Stack, ...]:
        """`blocks.stacks` of its shapes."""
        key = ("stacks", *high_precision, "modulation", *modulation, "fp32", *kept_in_fp32)
        return self._known(
            key,
            lambda: stacks(
                self.shapes, self.quantized(high_precision), kept_in_fp32, self.matching(modulation)
            ),
        )

    def _known(self, key: tuple[str, ...], make: Callable[[], _T]) -> _T:
        """What `make` gives, once: plans are made of the same component again and again."""
        if key not in self._cache:
            self._cache[key] = make()
        found: _T = self._cache[key]
        return found

    @functools.cached_property
    def _cache(self) -> dict[tuple[str, ...], Any]:
        return {}


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What `resolve` needs to know of one run's model, all of it in numbers.

    Built by the caller (see `cli`), because floors below the families cannot ask them.
    """

    components: tuple[ComponentGeometry, ...]
    lora_parameters: int
    """Parameters that the adapter adds for the run's rank and targets; 0 for `method: full`."""
    lora_layers: int = 0
    """Linear layers that have one."""
    quantized_parameters: int
    """Parameters of linear weights that a quantised base would hold quantised, or that are stored so."""
    quantized_rows: int
    """Output rows of those weights: one scale each in int8 and fp8."""
    activations: Activations
    activations_compiled: Activations
    """With compiled blocks."""
    largest_quantized: int = 0
    """Parameters of the largest of those weights."""
    modulation: Linears = NO_LINEARS
    """What int8 and nf4 bases hold quantised besides: see `Family.modulation`."""
    fp32_parameters: int = 0
    """Parameters that the model's class keeps in fp32 in a bf16 run."""
    matmul_flops: float = 0.0
    """Of the blocks' linear layers in one forward pass of a micro-batch with captions of usual length."""
    attention_flops: float = 0.0
    """The same of attention."""
    attention_calls: int = 0
    """Calls of the kernel that `attention_shape_class` names, in one forward pass."""
    products: int = 0
    """Linear layers of the blocks."""
    usual_share: float = 1.0
    """Tokens of such a micro-batch, as a share of those with the longest captions."""
    usual_parts: tuple[float, ...] = ()
    """Micro-batches of one, two ... of its samples, on average, as their shapes differ; empty: it is one."""
    pictures_known: bool = False
    """Whether that is by the shapes of the run's pictures; else these are of six."""
    usual_parts_alike: tuple[float, ...] = ()
    """The same where captions are of one length: by the shapes of pictures alone."""
    usual_parts_padded: tuple[float, ...] = ()
    """The same where captions are padded to a few lengths."""
    blocks: int = 0
    """Repeated blocks."""
    stacks: tuple[Stack, ...] = ()
    """They in their stacks, the longest first."""
    text_bytes_peak: int = 0
    """Activations of the text encoders while caching, in bytes."""
    vae_bytes_peak: int = 0
    """Activations of the VAE for one image of the run, whole, in bytes."""
    vae_bytes_peak_tiled: int = 0
    """The same with tiling."""
    attention_shape_class: str = ""
    """Key of the probe's verdicts on attention: heads, head width and tokens of the run."""
    matmul_shape_class: str = ""
    """Key of those on linear layers: tokens, rows and columns."""
    captions_vary: bool = False
    """The family's encoder does not pad captions: each has a length of its own."""
    packed: bool = False
    """The family packs several samples into one row: rows differ in length from one to the next."""
    stored_as: str = ""
    """`nf4` where the checkpoint of the trained component is quantised already; nothing else can be read."""
    stored_bytes: int = 0
    """Bytes of its quantised weights with their scales, as they are in the files."""


TABLES = Path(__file__).parent / "tables"


def component_shapes(
    folder: Path | None, family: str, roles: Mapping[str, Role], *, name: str = ""
) -> tuple[ComponentGeometry, ...]:
    """Shapes of the components in `roles`: safetensors headers below `folder`, or a committed table.

    The table is that of the full-size model, for `folder` None. `name` is what the user called the folder.
    Raises AccessError for files that cannot be read and for components without any.
    """
    if folder is None:
        table = TABLES / f"{family}.json"
        source = f"committed table of the full-size {family}"
        parts = [_from_table(stamp_of([table]), part, role, source) for part, role in roles.items()]
    else:
        source = f"safetensors headers of {name or folder}"
        parts = [
            _from_headers(stamp_of(weight_files(folder / part).files), part, role, source)
            for part, role in roles.items()
        ]
    missing = [part.name for part in parts if not part.shapes]
    if missing:
        raise AccessError(
            f"no weights for {', '.join(missing)}",
            where=str(folder or TABLES / f"{family}.json"),
            remedy="the download may be incomplete: run `trainer fetch` again",
        )
    return tuple(parts)


# plans are made of the same files again and again: what is read of a file stands until the file changes
@functools.lru_cache(maxsize=64)
def _from_table(stamp: Stamp, name: str, role: Role, source: str) -> ComponentGeometry:
    shapes = _table(stamp).components.get(name, {})
    return ComponentGeometry(name=name, role=role, shapes=shapes, source=source)


@functools.lru_cache(maxsize=64)
def _from_headers(stamp: Stamp, name: str, role: Role, source: str) -> ComponentGeometry:
    return ComponentGeometry(name=name, role=role, shapes=shapes_in(stamp), source=source)


def read_table(path: Path) -> dict[str, Shapes]:
    """Shapes by component from a compact table: rows of (name with {i}, shape, count)."""
    return _table(stamp_of([path])).components


def kept_in_fp32(family: str) -> tuple[str, ...]:
    """Parts of tensor names that the class of the family's trained component keeps in fp32 always."""
    return _table(stamp_of([TABLES / f"{family}.json"])).kept_in_fp32


@dataclass(frozen=True, kw_only=True)
class _Table:
    components: dict[str, Shapes]
    kept_in_fp32: tuple[str, ...]


@functools.lru_cache(maxsize=32)
def _table(stamp: Stamp) -> _Table:
    ((path, _, _),) = stamp
    content = json.loads(path.read_text())
    return _Table(
        components={component: expand(rows) for component, rows in content["components"].items()},
        kept_in_fp32=tuple(content.get("kept_in_fp32", ())),
    )


def expand(rows: Iterable[tuple[str, list[int], int]]) -> Shapes:
    """Shapes from rows of (name with {i}, shape, count)."""
    return {
        pattern.replace("{i}", str(index)): tuple(shape)
        for pattern, shape, count in rows
        for index in range(count)
    }


def compact(shapes: Shapes) -> list[tuple[str, list[int], int]]:
    """The rows that `expand` makes `shapes` of again: equal shapes under indices 0..n-1 become one row."""
    groups: dict[tuple[str, tuple[int, ...]], list[tuple[int, str]]] = {}
    for name, shape in shapes.items():
        found = re.search(r"(?<=\.)\d+(?=\.)", name)
        if found is None:
            groups.setdefault((name, shape), []).append((0, name))
        else:
            pattern = f"{name[: found.start()]}{{i}}{name[found.end() :]}"
            groups.setdefault((pattern, shape), []).append((int(found[0]), name))
    rows: list[tuple[str, list[int], int]] = []
    for (pattern, shape), members in groups.items():
        if sorted(index for index, _ in members) == list(range(len(members))):
            rows.append((pattern, list(shape), len(members)))
        else:
            rows.extend((name, list(shape), 1) for _, name in members)
    return rows


def linear_weights(shapes: Shapes) -> dict[str, tuple[int, int]]:
    """(out, in) of every matrix by module name: linear layers in trained components, and the embedding of a
    language model.
    """
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }


def quantized_linears(
    sizes: Mapping[str, tuple[int, int]], high_precision: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """(out, in), by module name, of the linear weights that a quantised base holds quantised."""
    kept = _matching(tuple(sizes), "|".join(f"(?:{pattern})" for pattern in high_precision))
    return {name: size for name, size in sizes.items() if name not in kept}


@functools.lru_cache(maxsize=64)
def _matching(names: tuple[str, ...], pattern: str) -> frozenset[str]:
    """Those of `names` that match as a whole; an empty pattern matches none."""
    expression = re.compile(pattern)
    return frozenset(name for name in names if pattern and expression.fullmatch(name))
