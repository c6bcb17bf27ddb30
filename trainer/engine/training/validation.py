"""The loss on images that are not trained on, at draws that are the same each time."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.data.records import Record
from trainer.engine.caching.batches import draw_for, load_batch, to_device
from trainer.engine.caching.entries import Entries, data_fingerprint, list_entries
from trainer.engine.context import Context
from trainer.telemetry.sinks.records import ValidationRecord
from trainer.telemetry.status import Phase

_DRAWS = 4


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The samples to measure on."""

    entries: Entries
    settings: Any
    """The family's, with validation.seed for train.seed, and draws that training never sees."""
    data: str
    """Hash of everything that the loss depends on besides the weights."""


def held_out_entries(context: Context, records: Sequence[Record]) -> HeldOut | None:
    """The samples that `measure` needs; None without records."""
    if not records:
        return None
    config = context.config
    seeded = config.train.model_copy(update={"seed": config.validation.seed})
    settings = context.family.settings(context.source, config.model_copy(update={"train": seeded}))
    draws = f"{_DRAWS} even draws"  # losses of other draws do not compare
    parts = (data_fingerprint(records), str(config.validation.seed), config.flow.model_dump_json(), draws)
    return HeldOut(
        entries=list_entries(context, records),
        # of a language model nothing is drawn
        settings=None if settings is None else dataclasses.replace(settings, measured_draws=_DRAWS),
        data=hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16],
    )


def measure(context: Context, model: Any, held_out: HeldOut, *, step: int) -> ValidationRecord:
    """Mean loss over all samples and draws.

    Before the first step a stop request ends it. Later none does: the row of a step is written once, and
    needs the loss of all samples.
    """
    family, settings, total_steps = context.family, held_out.settings, context.config.train.max_train_steps
    total, weight = torch.zeros((), device=context.device), 0.0
    was_training = model.training
    model.eval()  # without an adapter's dropout
    for record in range(len(held_out.entries.records)):
        if step == 0:
            context.stop.raise_if_requested()
        loaded = load_batch(context, held_out.entries, [(record, False)], pin_memory=False)
        # nothing is drawn for a language model: once is enough
        for number in range(1 if settings is None else _DRAWS):
            draw = draw_for(family, loaded, settings, [record * _DRAWS + number])
            batch, draw = to_device(loaded, draw, context.device, context.dtype)
            weight += batch.weight
            with torch.no_grad():
                total += family.loss(model, batch, draw, settings).sum()
        context.status.beat(Phase.TRAIN if step else Phase.FIRST_STEP, step=step, total=total_steps)
    model.train(was_training)
    loss = float(total.item()) / weight
    return ValidationRecord(step=step, validation_loss=loss, validation_data=held_out.data)
