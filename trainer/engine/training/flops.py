"""FLOP of micro-batches as they are, for model TFLOP/s and MFU in the log."""

from __future__ import annotations

import functools
from collections.abc import Callable

from trainer.data.records import ImageRecord
from trainer.data.sampler import MicroBatch
from trainer.engine.caching.entries import Entries, control_views
from trainer.engine.context import Context
from trainer.families.family import Family
from trainer.planning.shapes.model_flops import model_flops
from trainer.planning.shapes.run_shapes import trained_geometry

Counter = Callable[[MicroBatch], float]


def counter(context: Context, entries: Entries) -> Counter:
    """A function that gives the FLOP of training on a micro-batch's samples, whichever rank computes them.

    Padding counts nothing but where the family's encoder makes it.
    """
    family, config = context.family, context.config
    model_config = context.source.component_config(family.trained_component)
    component = trained_geometry(family, config, context.source.folder)
    flops = model_flops(family, config.method, model_config, component)
    of, length = functools.cache(flops.of), family.packed_by or family.caption

    def sample_flops(record: int, dropped: bool) -> float:
        text = (entries.empties if dropped else entries.texts)[record]
        tokens = entries.headers[text.key][length][0] if length else config.data.max_sequence_length
        if not entries.latents:
            return of(tokens=tokens)
        picture = entries.latents[record].record
        size = {"width": picture.bucket_width, "height": picture.bucket_height}
        count = len(picture.controls)
        if count:
            size["control_pixels"] = control_pixels(picture, family) // count
        return of(tokens=tokens, controls=count, **size)

    return lambda micro_batch: sum(sample_flops(one.record, one.dropped) for one in micro_batch)


def control_pixels(picture: ImageRecord, family: Family) -> int:
    """Pixels of a sample's control images together, as they are encoded."""
    sizes = [
        view.crop or family.control_size(view.control.width, view.control.height)
        for view in control_views(picture)
    ]
    return sum(width * height for width, height in sizes)
