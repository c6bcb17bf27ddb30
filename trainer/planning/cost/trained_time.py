"""Predicted time of what only runs that train whole weights do, and of a language model's head.

Bytes are counted from the code, and divided by what one H200 was measured to reach (docs/fp8.md).
"""

from __future__ import annotations

from trainer.families import language
from trainer.planning.cost import states
from trainer.planning.cost.storage import Storage, parameters
from trainer.planning.shapes.geometry import Geometry
from trainer.ways.storages import VALUE_BYTES

# bytes of a value that quantising passes: an input or a gradient by rows, a gradient by columns, and what
# backward keeps of an input as it is transposed
_BY_ROWS, _BY_COLUMNS, _BYTES_TRANSPOSED = 3, 3, 2
# an input's bytes in bf16 again, for a weight's gradient that is multiplied so
_UNPACKED = 3
# share of the memory's rate: 3.2 of 4.8 TB/s for both layouts of a gradient of 4,096 x 28,672 values
_SHARE = 0.66
# a logit, from its product to its gradient: in bf16 once, in fp32 with each pass over it
_LOGIT_PASSED = 46
# a value of the head's gradient: zeros, the factor of the loss in fp32; and for each part of the tokens
_HEAD_PASSED, _HEAD_PART_PASSED = 22, 4


def optimizer_ms(storage: Storage, geometry: Geometry, terabytes: float) -> float:
    """The optimizer's step with norm and clipping, and the FP8 bytes of the weights that follow it, on a GPU
    whose memory passes so many TB a second; 0 where an adapter trains, whose step is lost among the others.
    """
    if storage.method != "full":
        return 0.0
    size, share = states.passed(storage.optimizer, averaged=storage.averaged)
    step = parameters(geometry, "trained") / storage.ranks * size / share
    way = storage.way
    # the weight is read and each copy written; the transposed one is made of bytes that a cache still holds
    own = geometry.quantized.parameters / (storage.ranks if storage.in_rows else 1)
    follows = own * (storage.value_bytes + way.copies) if way.compute else 0
    return (step + follows / _SHARE) * 1e-9 / terabytes


def adding_ms(storage: Storage, geometry: Geometry, bytes_ms: float) -> float:
    """Adding a batch's gradients to those of the micro-batches before, `bytes_ms` for a byte; the first one's
    become the sums.
    """
    each = states.of(storage.method, storage.dtype, storage.optimizer)[1]
    parts = sum(geometry.usual_parts.get("as they are", (1.0,)))
    others = max(0.0, parts - 1 / storage.rounds) if storage.method == "full" else 0.0
    return others * 3 * each * parameters(geometry, "trained") / storage.ranks * bytes_ms


def quantising_ms(
    storage: Storage, geometry: Geometry, terabytes: float, *, forwards: float, probed: bool
) -> float:
    """Quantising inputs and gradients of trained layers in a micro-batch.

    Where a probe's time of products counts (`probed`), it has what a frozen layer needs in it.
    """
    read, given, alone = geometry.linear_values
    if storage.in_rows:  # no linears are joined there
        read = alone
    by_rows = 0.0 if probed else (read * forwards + given) * _BY_ROWS
    by_columns = read * _BYTES_TRANSPOSED + given * _BY_COLUMNS
    if storage.weight_gradient == "bf16":
        by_rows, by_columns = by_rows + read * _UNPACKED, 0
    return (by_rows + by_columns) / _SHARE * 1e-9 / terabytes


def head_ms(storage: Storage, geometry: Geometry, rate: float, bytes_ms: float) -> float:
    """A language model's head and loss, forward and backward, at `rate` FLOP a millisecond."""
    (words, width), tokens = geometry.head_size, geometry.head_tokens
    full = storage.method == "full"
    products = (3 if full else 2) * 2.0 * tokens * words * width / rate
    size = tokens * words * _LOGIT_PASSED
    if full:
        size += words * width * (_HEAD_PASSED + _HEAD_PART_PASSED * -(-tokens // language.LOGITS_TOKENS))
    return products + size * bytes_ms


def travelling_bytes(storage: Storage, geometry: Geometry) -> float:
    """Bytes that a rank receives in a micro-batch of weights in rows: weights for both passes, and sums of
    gradients in fp32.
    """
    others, count = (storage.ranks - 1) / storage.ranks, parameters(geometry, "trained")
    # in FP8 bytes come in place of values
    less = geometry.quantized.parameters * (storage.value_bytes - 1) if storage.way.compute else 0
    return others * (2 * (count * storage.value_bytes - less) + count * VALUE_BYTES["fp32"])
