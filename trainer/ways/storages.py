"""Ways to store the weights of a base and to multiply with them: one row each, read by every floor.

Predicted memory and time, what `auto` tries in which order, suggestions and the probe's kernels follow from
these rows; the words of `features` in `config.schema` are held equal to them by a test. A new way for a
frozen base is a row here. One with a new word in `weights` needs a layer too: a `StoredLinear` in a module of
`modeling.storage`, and its row in the table `LAYERS` of `modeling.storage.layers`. All ways with the same
word share it, and it reads `Way.compute`. One with a new word in `compute` is predicted at the rate that the
probe measures; without a measurement `planning.cost.roofline` knows the peaks of bf16 and FP8 alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

VALUE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Types that a run computes in -> bytes of a value."""
ENCODERS_KEEP = (r"(?!.*\.\d+\.).*", r".*\.(wo|relative_attention_bias)")
"""Expressions for modules of a text encoder that are never quantised: all but its layers, and in these what a
class reads the type of, or looks up rows of."""
ENCODERS_FP32_IN_FP16 = ("wo",)
"""Words in the names of text encoders' tensors that their classes keep in fp32 in an fp16 run."""
NF4_MOST_UNPACKED = 64 * 2**20
"""Values of an nf4 weight that are unpacked at a time."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to store the linear weights of a base and to multiply with them."""

    name: str
    weights: str
    """The storage's word in `features.weights` and in plan.json."""
    compute: str = ""
    """The type of products, a word of `features.compute`: `fp8`; empty: the run's type."""
    copies: int = 1
    """2: weights are stored transposed too, for backward."""
    modulation: str = ""
    """Storage of the linears of `Family.modulation` where it is another than that of the others."""
    packs: bool = False
    """Whether the linears of `Family.modulation` are stored in this way too; else in the run's type."""
    trains: bool = False
    """Whether such weights can be trained. All other ways are for a frozen base, and take fewer bytes."""
    method: str = ""
    """The `method` of the only runs that it is for: `full`; empty: of both, or by `trains`."""
    bits: int
    """Bits of one value in one copy; of a trained weight that is multiplied in another type, of the copies
    that are made of it once a step.
    """
    row_bytes: int = 0
    """Bytes of the scale of each output row."""
    block: int = 0
    """Values that share a scale of one byte, of which 256 share one in fp32; 0: none do."""
    layer_bytes: int = 0
    """Bytes of the tables that each layer has."""
    most_unpacked: int = 0
    """Values that are unpacked at a time; 0: a whole weight."""
    encoder_bytes: int = 0
    """Bytes of memory for a value of a text encoder's weight while it is packed; 0: encoders have no such
    storage.
    """
    unpack_traffic: tuple[float, float] = (0.0, 0.0)
    """Bytes moved to unpack one value for one product, in eager and in compiled blocks."""
    counted_as: str = ""
    """The storage whose activation counts hold for this one too; empty: it has its own."""
    package: str = ""
    """Distribution that implements the storage, and its module."""
    module: str = ""
    extra: str = ""
    """The project's extra that installs it; empty: it is required."""
    least_capability: tuple[int, int] = (0, 0)
    """Least compute capability of a GPU for this way; a way with a `compute` is not for CPUs."""
    least_compiled: tuple[int, int] = (0, 0)
    """Least compute capability of a GPU on which blocks with such weights are compiled."""
    verdict: str = ""
    """The probe's kernel; empty where none measures this way."""
    tolerance: float = 2e-2
    """Largest relative error against fp32 of the probe's kernel: quantised values are off by themselves."""
    tier: int = 0
    """Rank by loss of precision: `auto` tries a higher tier where no way of a lower one fits."""
    automatic: bool = True
    """Whether `auto` may choose it; a user gets the others by writing their storage or modulation."""
    instead_of: str = ""
    """The storage that it stands in for, where `auto` cannot have that one."""
    smaller: tuple[str, ...] = ()
    """Storages that take less memory; FP8, which may be stored twice, is not the first of them."""


_PLAIN = Way(name="bf16", weights="bf16", trains=True, bits=16, smaller=("int8", "fp8", "nf4"))
_FP8 = Way(
    name="fp8",
    weights="fp8",
    compute="fp8",
    bits=8,
    row_bytes=4,
    unpack_traffic=(14.0, 3.0),
    least_capability=(8, 9),
    # Triton has no FP8 values for GPUs without FP8 units, torch itself has
    least_compiled=(8, 9),
    verdict="matmul.fp8",
    tolerance=6e-2,
    tier=1,
    smaller=("nf4",),
)
_TWICE = replace(_FP8, name="fp8 kept twice", copies=2)
# multiplied by the same operator as int8
_UNPACKED = replace(
    _FP8,
    name="fp8 unpacked",
    compute="",
    counted_as="int8",
    least_capability=(0, 0),
    verdict="",
    tier=2,
    instead_of="int8",
)
_TRAINED = Way(
    name="bf16 trained in fp8",
    weights="bf16",
    compute="fp8",
    trains=True,
    method="full",
    bits=8,
    row_bytes=4,
    least_capability=(8, 9),
    least_compiled=(8, 9),
)
_BESIDE = {
    way.name: replace(way, name=f"{way.name} with modulation in int8", modulation="int8", tier=2)
    for way in (_FP8, _TWICE, _UNPACKED)
}
_ROWS = (
    replace(_PLAIN, verdict="matmul.bf16"),
    replace(_PLAIN, name="fp16", weights="fp16"),
    replace(_PLAIN, name="fp32", weights="fp32", bits=32, smaller=("int8", "nf4")),
    Way(
        name="int8",
        weights="int8",
        packs=True,
        bits=8,
        row_bytes=4,
        # through fp32 and its product with the scale
        encoder_bytes=8,
        # eager as it was on the H200, the others by what is read and written
        unpack_traffic=(14.0, 3.0),
        package="optimum-quanto",
        module="optimum.quanto",
        verdict="matmul.int8",
        tolerance=3e-2,
        tier=2,
        smaller=("nf4",),
    ),
    Way(
        name="nf4",
        weights="nf4",
        packs=True,
        bits=4,
        block=64,
        # code tables and an offset: tiny, but the allocator gives out 512 bytes at least
        layer_bytes=2048,
        most_unpacked=NF4_MOST_UNPACKED,
        encoder_bytes=4,
        unpack_traffic=(6.0, 6.0),
        package="bitsandbytes",
        module="bitsandbytes",
        extra="nf4",
        verdict="matmul.nf4",
        tolerance=1.5e-1,
        tier=3,
    ),
    _TWICE,
    _FP8,
    replace(_BESIDE["fp8 kept twice"], automatic=False),
    _BESIDE["fp8"],
    _UNPACKED,
    replace(_BESIDE["fp8 unpacked"], automatic=False),
    replace(_TRAINED, name=f"{_TRAINED.name}, kept twice", copies=2),
    _TRAINED,
)
WAYS: dict[str, Way] = {way.name: way for way in _ROWS}
"""All rows by name, the plain types first."""


def find(weights: str, compute: str = "", copies: int = 1, modulation: str = "") -> Way:
    """The row of the four words by which a plan names its way; KeyError where there is none."""
    words = (weights, "" if compute in VALUE_BYTES else compute, copies, modulation)
    rows = {(way.weights, way.compute, way.copies, way.modulation): way for way in WAYS.values()}
    return rows[words]


def multiplied_in(compute: str) -> Way | None:
    """The first way for a frozen base with products in this word of `features.compute`; None where that means
    the run's type, or leaves it open.
    """
    ways = (way for way in WAYS.values() if way.compute and not way.trains)
    return next((way for way in ways if way.compute == compute), None)


def frozen() -> tuple[str, ...]:
    """Storages for a frozen base alone."""
    return tuple(dict.fromkeys(way.weights for way in WAYS.values() if not way.trains))
