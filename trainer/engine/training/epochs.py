"""The optimizer steps of a run whose length is written in epochs.

An epoch holds every sample `repeats` times. A step takes its samples from one epoch after another, and the
run ends with the step by which as many samples were trained on as the epochs hold. Rows that conversations
are packed into take as many as fit: their steps are counted by making them, from the conversations' lengths.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from trainer.config.schema import changed
from trainer.data.records import Record
from trainer.engine.context import Context
from trainer.engine.training.feed import sampler_of
from trainer.planning.plan import Decision
from trainer.telemetry.run_folder.plan import STEPS
from trainer.telemetry.status import Phase
from trainer.words.plurals import numbered


def with_steps(context: Context, records: Sequence[Record]) -> Context:
    """The context with the steps of `train.num_train_epochs` as its `train.max_train_steps`, which it tells
    and its plan has a row of; as it is where the length is written in steps. All ranks find the same.

    A warm-up that is no shorter becomes a tenth of them, since nobody who writes epochs knows their steps.
    """
    epochs, warm_up = context.config.train.num_train_epochs, context.config.train.lr_warmup_steps
    if epochs is None:
        return context
    in_epoch = sum(record.repeats for record in records)
    wanted = max(1, math.ceil(round(epochs * in_epoch, 6)))
    steps = _steps(context, records, wanted)
    verb, samples = "is" if epochs == 1 else "are", numbered(in_epoch, context.family.sample_kind)
    length = f"{numbered(epochs, 'epoch')} of {samples} {verb} {numbered(steps, 'step')}"
    found: dict[str, Any] = {"train.max_train_steps": steps}
    if warm_up >= steps:
        found["train.lr_warmup_steps"] = steps // 10
        length += f", of which the learning rate rises for {steps // 10} in place of {warm_up}"
    context.say(length)
    # the configuration keeps its epochs: only this row of the run's plan says its steps
    row = Decision(STEPS, str(steps), "counted", f"{numbered(epochs, 'epoch')} of {samples}")
    plan = dataclasses.replace(context.plan, decisions=(*context.plan.decisions, row))
    return dataclasses.replace(context, config=changed(context.config, found), plan=plan)


def _steps(context: Context, records: Sequence[Record], wanted: int) -> int:
    """The least number of steps that hold as many samples as are wanted."""
    family, plan = context.family, context.plan
    if family.packed_by is None:
        return -(-wanted // (plan.micro_batch_size * plan.accumulation_steps))
    assert family.conversation_tokens is not None, "rows of other samples than conversations"
    limit, count = context.config.data.max_sequence_length, family.conversation_tokens(context.source)
    sizes = []
    for record in records:
        context.alive(Phase.LOAD)
        # what is too long is refused when it is encoded, with its name
        sizes.append(min(count(record.caption), limit))
    alike = [()] * len(records)
    sampler, steps = sampler_of(context, records, alike, alike, sizes, limit), 0
    while wanted > 0:
        context.alive(Phase.LOAD)
        wanted -= sum(map(len, sampler.step(steps)))
        steps += 1
    return steps
