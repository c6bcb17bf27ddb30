"""Predicted milliseconds of a batch, from what the GPU can do at most. Nothing is measured.

Shares of the peaks, launch times and traffic were fitted to three models on one H200 (docs/benchmarks.md); on
other GPUs the same shares are taken of their makers' figures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer.machine.facts import EXCHANGED_BYTES, Gpu, KernelVerdict, LinkVerdict
from trainer.planning.cost import trained_time
from trainer.planning.cost.memory import packed_linears, read_bytes
from trainer.planning.cost.storage import Storage
from trainer.planning.shapes.geometry import Geometry
from trainer.ways.kernels import KERNELS
from trainer.ways.storages import WAYS
from trainer.words.sizes import GIB


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Peaks of a GPU: dense products in TFLOP/s with fp32 sums, memory in TB/s."""

    bf16: float
    fp8: float
    """0.0 where there are no FP8 units."""
    bandwidth: float
    flash: float = 0.55
    """Share of the peak that flash attention reaches, forward and backward: on an A100, by its authors."""


# torch's flash kernel was not written for Hopper
_HOPPER_FLASH = 0.28
# figures of the makers' data sheets, dense; GeForce cards sum in fp32 at half of their FP8 figure
_RATES: tuple[tuple[str, Rates], ...] = (
    ("GH200", Rates(bf16=989, fp8=1979, bandwidth=4.0, flash=_HOPPER_FLASH)),
    ("H200", Rates(bf16=989, fp8=1979, bandwidth=4.8, flash=_HOPPER_FLASH)),
    ("H200 NVL", Rates(bf16=835, fp8=1671, bandwidth=4.8, flash=_HOPPER_FLASH)),
    ("H100 PCIe", Rates(bf16=756, fp8=1513, bandwidth=2.0, flash=_HOPPER_FLASH)),
    ("H100 NVL", Rates(bf16=835, fp8=1671, bandwidth=3.9, flash=_HOPPER_FLASH)),
    ("H100", Rates(bf16=989, fp8=1979, bandwidth=3.35, flash=_HOPPER_FLASH)),
    ("B200", Rates(bf16=2250, fp8=4500, bandwidth=8.0)),
    ("A100-SXM4-40GB", Rates(bf16=312, fp8=0, bandwidth=1.56)),
    ("A100-PCIE-40GB", Rates(bf16=312, fp8=0, bandwidth=1.56)),
    ("A100", Rates(bf16=312, fp8=0, bandwidth=2.0)),
    ("L40S", Rates(bf16=362, fp8=733, bandwidth=0.86)),
    ("L40", Rates(bf16=181, fp8=362, bandwidth=0.86)),
    ("L4", Rates(bf16=121, fp8=242, bandwidth=0.3)),
    ("A40", Rates(bf16=150, fp8=0, bandwidth=0.7)),
    ("A10", Rates(bf16=125, fp8=0, bandwidth=0.6)),
    ("RTX PRO 6000 Blackwell", Rates(bf16=504, fp8=1008, bandwidth=1.79)),
    ("RTX 6000 Ada", Rates(bf16=364, fp8=728, bandwidth=0.96)),
    ("RTX A6000", Rates(bf16=155, fp8=0, bandwidth=0.77)),
    ("RTX 5090", Rates(bf16=209, fp8=419, bandwidth=1.79)),
    ("RTX 5080", Rates(bf16=113, fp8=225, bandwidth=0.96)),
    ("RTX 4090", Rates(bf16=165, fp8=330, bandwidth=1.01)),
    ("RTX 4090 D", Rates(bf16=147, fp8=294, bandwidth=1.01)),
    ("RTX 4080", Rates(bf16=97, fp8=195, bandwidth=0.72)),
    ("RTX 4080 SUPER", Rates(bf16=104, fp8=209, bandwidth=0.74)),
    ("RTX 3090", Rates(bf16=71, fp8=0, bandwidth=0.94)),
    ("RTX 3090 Ti", Rates(bf16=80, fp8=0, bandwidth=1.01)),
    ("GB10", Rates(bf16=125, fp8=250, bandwidth=0.273)),
)
GENERIC = Rates(bf16=312, fp8=624, bandwidth=2.0)
"""Rates for an unknown GPU, which put settings in order: only their proportions count."""

# H200: 720 of 989 TFLOP/s in bf16, 1430 of 1979 in FP8
_MATMUL_SHARE = {"bf16": 0.728, "fp8": 0.723}
_BANDWIDTH_SHARE = 0.8
# pointwise work, forward and backward: bytes moved for each byte that is kept for backward, and time of
# launches a block, which the device waits for
_TRAFFIC = {"eager": 20.5, "compiled": 6.8}
_LAUNCHES_MS = {"eager": 1.2, "compiled": 0.45}
# time of the host to begin a linear layer's kernels in eager blocks, forward and backward, more for its
# adapter, and more where it multiplies in FP8 or unpacks its weight: measured with two models in bf16 and two
# in FP8 on the host of an H200 (docs/benchmarks.md)
_HOST_PRODUCT_MS, _HOST_ADAPTER_MS, _HOST_PACKED_MS = 0.3, 0.65, 0.35
# quantising activations and gradients to one byte over a frozen base, bytes moved likewise
_QUANTISING_TRAFFIC = 1.5
_ATTENTION_BACKWARD = 2.5
"""Work of attention's backward in forwards."""
_FORWARD_POINTWISE = 0.35
"""Share of the pointwise work that is forward."""
_HOST_COPY_BYTES = 20e9
"""Copies from pinned host memory, in bytes a second: assumed for PCIe 4.0 with 16 lanes, not measured."""
_PEER_COPY_BYTES = 370e9
"""Copies from another GPU's memory over NVLink, in bytes a second, measured on two H200."""
GATHERED_BYTES = 270e9
"""Rate at which NCCL gathers and sums over NVLink, in bytes a second: two H200, 2 GiB at once."""
_TOO_SOON_BYTES = 100e9
"""Bytes a second above which the probe's exchange says little: below them 64 MiB take a millisecond."""
_SHOWN_OF_GATHERING = 0.95
"""Time that gathering weights in rows and summing their gradients adds to a micro-batch, as a share of what
the bytes take at that rate: fitted to six full fine-tunes of two models in bf16, on two and on four H200 of
three hosts, whose steps it gives within 7 % (docs/several-gpus.md).
"""
_SLOWED_BY_COPIES = 0.27
"""Share of the time of such copies by which the work beside them takes longer, measured there too: 0.25 and
0.27 with two models in bf16.
"""
_INSIDE = 0.6
"""Share of its products that a compiled block repeats which keeps its input alone: 7 or 8 parts of 12, where
feed-forwards are four times as wide as the block.
"""
_CHEAP_FIRST = 2.8
"""Recomputing what is beyond a share b kept costs (1 - b) to this power of all: 0.3 cost 37 % on the H200."""


def rates(gpu: Gpu) -> Rates | None:
    """The GPU's peaks by its name; None where they are not known, as of a card whose name says more than a
    row's, such as RTX 5090 D or H100 CNX.
    """
    if any(word in gpu.name for word in _LESS):
        return None
    return next((found for name, found in _RATES if _is_named(gpu.name, name)), None)


def _is_named(gpu: str, name: str) -> bool:
    """Whether a GPU's name is this one, with nothing else behind it than its memory or its socket."""
    return re.search(rf"(?<!\w){re.escape(name)}{_SAME_CARD}$", gpu, re.IGNORECASE) is not None


_SAME_CARD = r"([ -](\d+GB?|HBM\d\w?|SXM\d?|PCIe|Generation|(Workstation|Server) Edition))*"
_LESS = ("Laptop", "Max-Q", "MIG")
"""Words in the names of GPUs that have less than the one they are called after."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The rates and verdicts that times are predicted from."""

    rates: Rates
    known: bool = True
    """False where `rates` stand in for those of a machine that is not known."""
    attention: str
    """The kernel that the run uses."""
    attention_ms: float | None = None
    """Milliseconds of one attention call, forward and backward, if the probe measured the run's shape."""
    peer_bytes: float = 0.0
    """Bytes a second from another GPU's memory, where the probe measured it."""
    gathered_bytes: float = GATHERED_BYTES
    """Bytes a second that a rank receives of weights in rows."""
    way_known: bool = True
    """False where processes are on several hosts, of whose way nothing is known: its time is not counted."""
    matmul: Mapping[str, float] = field(default_factory=dict)
    """Time of a frozen linear layer by its kind, as a share of bf16's, where the probe measured it."""


def speed(
    gpu: Gpu | None,
    verdicts: Sequence[KernelVerdict],
    geometry: Geometry,
    attention: str,
    dtype: str = "bf16",
    *,
    link: LinkVerdict | None = None,
    way_known: bool = True,
) -> Speed:
    """The rates of a GPU, or generic ones that put settings in order, and the verdicts that count here.

    Those on attention are of the run's type; those on linear layers are all measured in bf16. `link` is the
    verdict on the way between the run's GPUs of one host, and `way_known` is False where there are several.
    """
    counting = {(geometry.attention_shape_class, dtype), (geometry.matmul_shape_class, "bf16")}
    found = {
        row.kernel: row.milliseconds
        for row in verdicts
        if row.works and (row.shape_class, row.dtype) in counting
    }
    base, known = found.get("matmul.bf16"), rates(gpu) if gpu is not None else None
    return Speed(
        rates=known or GENERIC,
        known=known is not None,
        attention=attention,
        attention_ms=found.get(f"attention.{attention}"),
        peer_bytes=link.gib_per_second * GIB if link is not None else 0.0,
        gathered_bytes=gathered_bytes(link),
        way_known=way_known,
        matmul={
            way.weights: ms / base
            for way in WAYS.values()
            if base and not way.trains and (ms := found.get(way.verdict)) is not None
        },
    )


def gathered_bytes(link: LinkVerdict | None) -> float:
    """Bytes a second that a rank receives of weights in rows: as over NVLink, but no more than the probe's
    copies had, nor than its exchange where GPUs do not read each other, or where that was slow.

    A fast exchange of 64 MiB is over too soon to tell: it had 170 to 390 GB/s on hosts whose steps took
    equally long.
    """
    if link is None:
        return GATHERED_BYTES
    copied, exchanged = link.gib_per_second * GIB, exchanged_bytes(link)
    if copied and exchanged > _TOO_SOON_BYTES:
        exchanged = 0.0
    return min(copied or GATHERED_BYTES, exchanged or GATHERED_BYTES, GATHERED_BYTES)


def exchanged_bytes(link: LinkVerdict) -> float:
    """Bytes a second of an exchange, 0 unmeasured: the probe's are gradients, and sums of twice as many."""
    if not link.exchange_ms:
        return 0.0
    return (link.gpus - 1) / link.gpus * 3 * EXCHANGED_BYTES / link.exchange_ms * 1e3


def milliseconds(storage: Storage, geometry: Geometry, speed: Speed) -> float:
    """A batch, forward and backward, in the micro-batches that its samples' shapes usually make, and where
    whole weights train the time of adding up its gradients and its share of the optimizer's step.

    A frozen base has the gradient of the input only, so backward costs as much as forward; a trained one
    twice that. Recomputing adds forward's share.
    """
    parts = usual_parts(storage, geometry, speed.attention)
    passes = sum(
        count * _part_ms(storage, geometry, speed, samples / len(parts))
        for samples, count in enumerate(parts, 1)
    )
    adding = trained_time.adding_ms(storage, geometry, 1e-9 / (speed.rates.bandwidth * _BANDWIDTH_SHARE))
    return passes + adding + optimizer_ms(storage, geometry, speed) / storage.rounds


def optimizer_ms(storage: Storage, geometry: Geometry, speed: Speed) -> float:
    """The optimizer's step, once for all micro-batches of it; 0 where an adapter trains."""
    return trained_time.optimizer_ms(storage, geometry, speed.rates.bandwidth)


def _part_ms(storage: Storage, geometry: Geometry, speed: Speed, share: float) -> float:
    """One micro-batch of this share of the batch's samples."""
    way, style = storage.way, "compiled" if storage.compile else "eager"
    again, repeated = _recomputed(storage, geometry)
    forwards, backwards = 1.0 + again, 2.0 if storage.method == "full" else 1.0
    products = 1.0 + again * repeated + backwards
    move_ms = 1e-9 / (speed.rates.bandwidth * _BANDWIDTH_SHARE)
    pointwise = (1 - _FORWARD_POINTWISE) + _FORWARD_POINTWISE * forwards
    # traffic is of what eager blocks keep: that is what the figures were fitted to
    saved = share * geometry.usual_share * geometry.activations.saved
    traffic = _TRAFFIC[style] * saved
    # what the probe measured includes quantising
    if way.compute and not way.trains and way.weights not in speed.matmul:
        traffic += _QUANTISING_TRAFFIC * saved
    # without a second copy every weight is read and written once more in backward, transposed
    transposed = geometry.quantized.parameters * 2 if way.compute and way.copies == 1 else 0
    # modulation beside FP8 is unpacked once a forward pass: it has no gradient
    beside = WAYS[way.modulation].unpack_traffic[storage.compile] if way.modulation else 0.0
    computing = (
        products * _product_ms(storage, geometry, speed, share)
        + share * _head_and_trained_ms(storage, geometry, speed, forwards)
        + share * (forwards + _ATTENTION_BACKWARD) * _attention_ms(storage, geometry, speed)
        + pointwise * (traffic * move_ms + geometry.blocks * _LAUNCHES_MS[style])
        + transposed * move_ms
        + beside * geometry.modulation.parameters * move_ms * forwards
    )
    if not storage.compile:
        # the host begins all kernels of eager blocks, and a fast GPU waits for that
        each = _HOST_PRODUCT_MS + (0.0 if way.trains else _HOST_PACKED_MS)
        host = geometry.products * each + geometry.lora_layers * _HOST_ADAPTER_MS
        computing = max(computing, pointwise * host)
    return computing + _copying_ms(storage, geometry, speed, computing)


def _head_and_trained_ms(storage: Storage, geometry: Geometry, speed: Speed, forwards: float) -> float:
    """A language model's head, and what products of trained weights in FP8 need beside themselves."""
    plain, move_ms = _plain_rate(storage, speed), 1e-9 / (speed.rates.bandwidth * _BANDWIDTH_SHARE)
    head = trained_time.head_ms(storage, geometry, plain, move_ms)
    if not (storage.way.trains and storage.way.compute):
        return head
    quantising = trained_time.quantising_ms(
        storage, geometry, speed.rates.bandwidth, forwards=forwards, probed="fp8" in speed.matmul
    )
    if storage.weight_gradient != "bf16":
        return head + quantising
    return head + quantising + geometry.matmul_flops / plain - _product_ms(storage, geometry, speed, 1.0)


def usual_parts(storage: Storage, geometry: Geometry, attention: str) -> tuple[float, ...]:
    """Micro-batches of one, two ... of a batch's samples, on average, captions as they are padded."""
    padded = storage.compile and storage.method == "lora" and not KERNELS[attention].exact_only
    return geometry.usual_parts.get("padded" if padded else "as they are", (1.0,))


def _copying_ms(storage: Storage, geometry: Geometry, speed: Speed, computing_ms: float) -> float:
    """Time in which the device waits for blocks from host memory, each copied while those before it compute.

    A third of the work is forward where all blocks are recomputed, and nearly a half where none is.
    """
    if storage.in_rows:
        return _rows_ms(storage, geometry, speed)
    if storage.sharded:
        return _peer_ms(storage, geometry, speed, computing_ms)
    if not storage.swapped:
        return 0.0
    longest = max(stack.blocks for stack in geometry.stacks)
    between = max(1.0, longest / storage.swapped) * computing_ms / max(1, geometry.blocks)
    forward = 1 / 3 if storage.checkpointing else 0.45
    copies = (size / storage.swapped / _HOST_COPY_BYTES * 1e3 for size in read_bytes(storage, geometry))
    times = zip(copies, (forward, 1 - forward), strict=True)
    return storage.swapped * sum(max(0.0, copy - share * between) for copy, share in times)


def _peer_ms(storage: Storage, geometry: Geometry, speed: Speed, computing_ms: float) -> float:
    """Time that reading blocks of other GPUs costs: twice a micro-batch, beside work that it slows, and on
    its own where it takes longer than the work.
    """
    read = sum(read_bytes(storage, geometry)) * (storage.group - 1) / storage.group
    copies = read / (speed.peer_bytes or _PEER_COPY_BYTES) * 1e3
    # the work beside them is that of as many blocks
    beside = computing_ms * storage.sharded / max(1, geometry.blocks)
    return _SLOWED_BY_COPIES * copies + max(0.0, copies - beside)


def _rows_ms(storage: Storage, geometry: Geometry, speed: Speed) -> float:
    """Time that gathering weights and sums of gradients adds to a micro-batch; 0 where no way is known."""
    if not speed.way_known:
        return 0.0
    travelling = trained_time.travelling_bytes(storage, geometry)
    return _SHOWN_OF_GATHERING * travelling / speed.gathered_bytes * 1e3


def _recomputed(storage: Storage, geometry: Geometry) -> tuple[float, float]:
    """(forward passes that backward repeats, 0 to 1, share of a pass's products that it repeats then)."""
    # a budget keeps no result of products that unpack their weight
    all_repeated = not storage.way.trains and not storage.way.compute and storage.activation_budget < 1.0
    # a graph leaves out what nothing waits for; `_CHEAP_FIRST` was fitted to whole passes
    inside = storage.compile and not storage.swapped and (storage.checkpointing or all_repeated)
    again = 1.0
    if storage.checkpointing:
        again = storage.recomputed / geometry.blocks if storage.recomputed else 1.0
    elif not all_repeated:
        again = float((1.0 - storage.activation_budget) ** _CHEAP_FIRST)
    return again, _INSIDE if inside else 1.0


def _rate(storage: Storage, peaks: Rates) -> float:
    """FLOP a millisecond of tensor cores in the run's type; products that stay fp32 run in TF32."""
    return peaks.bf16 * (0.5 if storage.dtype == "fp32" else 1.0) * 1e9


def _plain_rate(storage: Storage, speed: Speed) -> float:
    """FLOP a millisecond that plain products reach."""
    return _rate(storage, speed.rates) * _MATMUL_SHARE["bf16"]


def _product_ms(storage: Storage, geometry: Geometry, speed: Speed, share: float) -> float:
    """All linear layers of the blocks once, for this share of the batch."""
    way, peaks, flops = storage.way, speed.rates, share * geometry.matmul_flops
    plain = flops / _plain_rate(storage, speed)
    # of a trained layer in FP8 a product costs what a frozen one's does
    measured = way.compute if way.trains and way.compute else way.weights if way.verdict else ""
    if measured in speed.matmul:
        return plain * speed.matmul[measured]
    if way.compute == "fp8":
        return flops / ((peaks.fp8 or peaks.bf16) * 1e9 * _MATMUL_SHARE["fp8"])
    traffic = way.unpack_traffic[storage.compile] * packed_linears(way, geometry).parameters
    return plain + traffic * 1e-9 / (peaks.bandwidth * _BANDWIDTH_SHARE)


def _attention_ms(storage: Storage, geometry: Geometry, speed: Speed) -> float:
    """All attention calls, forward."""
    if speed.attention_ms is not None:
        # probed with the longest captions
        usual_ms = speed.attention_ms * geometry.usual_share**2
        return geometry.attention_calls * usual_ms / (1 + _ATTENTION_BACKWARD)
    share = KERNELS[speed.attention].peak_share or speed.rates.flash
    return geometry.attention_flops / (_rate(storage, speed.rates) * share)
