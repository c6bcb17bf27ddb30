"""The loss on held-out samples, at draws that are the same each time, and the LoRA of the lowest one: kept in
`best/`, and measured from its file at the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.data.records import Record
from trainer.engine.caching.batches import draw_for, load_batch, to_device
from trainer.engine.caching.entries import Entries, data_fingerprint, list_entries, template_key
from trainer.engine.context import Context
from trainer.engine.ranks import ALONE, Ranks
from trainer.engine.results import proof
from trainer.errors import DataError
from trainer.families.family import Family
from trainer.families.values import Batch, Draw
from trainer.files import atomic
from trainer.modeling.adapter import lora
from trainer.telemetry.run_folder.results import BEST_FOLDER as FOLDER
from trainer.telemetry.run_folder.results import BEST_RECORD as RECORD
from trainer.telemetry.run_folder.results import best_record
from trainer.telemetry.run_folder.results import read_best as read_best
from trainer.telemetry.sinks.records import ValidationRecord, written_values
from trainer.telemetry.status import Phase

_DRAWS = 4
_OF_RECORD = tuple(one.name for one in dataclasses.fields(ValidationRecord))
_NEW, _OLD = f"{FOLDER}.tmp", f"{FOLDER}.old"
"""Remains of a kill: of one that wrote the LoRA, and of an earlier version's that replaced the folder."""
_TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""Largest relative difference between the loss in training and from the file, without joined layers."""
_SMALL = 1e-2
"""Of a lower loss the difference counts as one of this: what rounding leaves there is no share of it."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The samples to measure the loss on."""

    entries: Entries
    settings: Any
    """The family's settings, with validation.seed for train.seed, and draws that training never sees."""
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
    parts = [data_fingerprint(records), str(config.validation.seed), config.flow.model_dump_json(), draws]
    parts += [] if config.data.learn == "answers" else [f"learn {config.data.learn}"]
    parts += [] if (template := template_key(context)) is None else [f"chat_template {template}"]
    tiled = context.plan.vae_tiling and "latents" in context.family.encoder_components
    parts += ["latents made in tiles"] if tiled else []
    return HeldOut(
        entries=list_entries(context, records),
        # nothing is drawn for a language model
        settings=None if settings is None else dataclasses.replace(settings, measured_draws=_DRAWS),
        data=hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16],
    )


def no_progress(samples: int) -> None:
    """Tell nobody of samples that are done."""


def measure(
    context: Context,
    model: Any,
    held_out: HeldOut,
    *,
    step: int,
    ranks: Ranks = ALONE,
    saves: bool = False,
    advance: Callable[[int], None] = no_progress,
) -> ValidationRecord:
    """Mean loss over all samples and draws, of which each of `ranks` computes a share; equal on all of them.

    Before the first step a stop request ends it. Later none does: the row of a step is written once, and
    needs the loss of all samples. `saves`: a file is proved at the end, of a step that may be long past; the
    heartbeats are those of saving. `advance` is told of all ranks' samples as they are done.
    """
    family, settings, was_training = context.family, held_out.settings, model.training
    total_steps = context.config.train.max_train_steps
    # nothing is drawn for a language model: once is enough
    count, draws = len(held_out.entries.records), 1 if settings is None else _DRAWS
    phase = Phase.SAVE if saves else Phase.TRAIN if step else Phase.FIRST_STEP
    together = context.plan.in_rows  # all pass through the model at the same time

    def load(record: int) -> Batch:
        if step == 0:
            context.stop.raise_if_requested()
        return load_batch(context, held_out.entries, [(record, False)], pin_memory=False)

    def own_share() -> _Share:
        losses, weights, correct = list[torch.Tensor](), list[float](), list[torch.Tensor]()
        for record in ranks.in_lockstep(count) if together else range(ranks.rank, count, ranks.size):
            loaded = _in_turn(load, record, ranks) if together else load(record)
            for number in range(draws):
                draw = draw_for(family, loaded, settings, [record * _DRAWS + number])
                batch, draw = to_device(loaded, draw, context.device, context.dtype)
                weights.append(batch.weight)
                loss, hits = _scores(family, model, batch, draw, settings)
                losses.append(loss)
                correct.extend(hits)
            context.status.beat(phase, step=None if saves else step, total=None if saves else total_steps)
            advance(min(ranks.size, count - record // ranks.size * ranks.size))  # the others do theirs
        return _on_host(losses), weights, _on_host(correct)

    model.eval()  # without an adapter's dropout
    shares = ranks.gathered(own_share()) if together else ranks.agreed(own_share)
    model.train(was_training)
    loss, accuracy = _means(shares, count, draws)
    perplexity = None if accuracy is None else _exp(loss)
    of_tokens = {"validation_perplexity": perplexity, "validation_token_accuracy": accuracy}
    return ValidationRecord(step=step, validation_loss=loss, validation_data=held_out.data, **of_tokens)


def _in_turn(load: Callable[[int], Batch], record: int, ranks: Ranks) -> Batch:
    """This rank's sample, once all ranks have read theirs. Raises on all of them where one cannot."""
    found: list[Batch] = []
    ranks.agreed(lambda: found.append(load(record)))
    return found[0]


_Share = tuple[torch.Tensor, list[float], torch.Tensor]
"""Of a rank's samples and draws in their order: losses, weights, and correct tokens, none where none are
learned."""


def _scores(
    family: Family, model: Any, batch: Batch, draw: Draw | None, settings: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sum of a batch's losses, and of its correct tokens, none where none are learned."""
    with torch.no_grad():
        if family.own_scores is None:
            return family.loss(model, batch, draw, settings).sum(), []
        losses, correct = family.own_scores(model, batch)
        return losses.sum(), [correct.sum()]


def _on_host(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(values).cpu() if values else torch.zeros(0)


def _means(shares: Sequence[_Share], count: int, draws: int) -> tuple[float, float | None]:
    """Mean loss, and the share of learned tokens that are correct, of all ranks' samples.

    Added in the records' order, losses in fp32: the same bits for any number of ranks.
    """
    total, weight, correct = torch.zeros(()), 0.0, 0.0
    for record in range(count):
        (losses, weights, hits), first = shares[record % len(shares)], record // len(shares) * draws
        for number in range(first, first + draws):
            total += losses[number]
            weight += weights[number]
            correct += float(hits[number]) if len(hits) else 0.0
    learns_tokens = any(len(hits) for _, _, hits in shares)
    return float(total.item()) / weight, correct / weight if learns_tokens else None


def _exp(loss: float) -> float:
    """exp, infinite where no number is as large."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def keep_best(context: Context, model: Any, record: ValidationRecord) -> None:
    """Write the adapter as it is where no kept one has a lower loss on the same held-out samples."""
    run_dir = context.run_dir
    if not _is_wanted(context) or not math.isfinite(record.validation_loss):
        return
    kept = read_best(run_dir)
    comparable = kept is not None and kept["validation_data"] == record.validation_data
    if kept is not None and comparable and kept["validation_loss"] <= record.validation_loss:
        return
    try:
        with atomic.whole_folder(run_dir / FOLDER) as new:
            path = proof.write_lora(context, model, new)
            proof.require_written(path, model)
            proof.write_twin(context, model, new)
            row = {"file": path.name, **written_values(record)}
            # last: with it the folder is whole
            atomic.write_text(new / RECORD, json.dumps(row, indent=1, sort_keys=True) + "\n")
    except DataError as error:  # read back otherwise: training goes on
        context.say(f"the LoRA of step {record.step} is not kept as the best: {error.problems[0].what}")
        return
    context.say(f"best so far: step {record.step}, held-out loss {record.validation_loss:.4g}")


def _is_wanted(context: Context) -> bool:
    return context.config.checkpoint.keep_best and context.config.method == "lora"


def lowest_now(
    context: Context, rows: Sequence[Mapping[str, Any]], held_out: HeldOut | None, step: int
) -> ValidationRecord | None:
    """The held-out loss of `step`, from which a run goes on, where it is the lowest of the log's `rows`.

    Its LoRA can be kept again, whose place one of a later step may have taken that was removed since.
    Says so where another step's is the lowest and its LoRA is not kept any more.
    """
    measured = [
        row
        for row in rows
        if held_out is not None
        and row["step"] > 0
        and row.get("validation_data") == held_out.data
        and row.get("validation_loss") is not None
    ]
    if not measured or not _is_wanted(context):
        return None
    least, kept = min(measured, key=lambda row: row["validation_loss"]), read_best(context.run_dir)
    if least["step"] == step:
        return ValidationRecord(**{name: least[name] for name in _OF_RECORD if name in least})
    data, loss = least["validation_data"], least["validation_loss"]
    if kept is None or kept["validation_data"] != data or kept["validation_loss"] > loss:
        what = f"step {least['step']} had the lowest held-out loss, {loss:.4g}, and its LoRA is gone"
        context.say(f"{what}: {FOLDER}/ is of the lowest from here on")
    return None


def restore_best(context: Context, step: int) -> None:
    """Keep the best LoRA only if a run that goes on from `step` has reached its step; none where `step` is 0.

    A folder that an earlier version's kill left whole is the kept one where there is none; other remains go.
    A kept one whose record is damaged stays under another name: of what step it is nobody knows.
    """
    run_dir, kept = context.run_dir, context.run_dir / FOLDER
    if step == 0:
        for name in (FOLDER, _NEW, _OLD):
            shutil.rmtree(run_dir / name, ignore_errors=True)
    for name in (_NEW, _OLD):
        if (run_dir / name / RECORD).is_file() and not kept.exists():
            (run_dir / name).replace(kept)
        shutil.rmtree(run_dir / name, ignore_errors=True)
    if kept.is_dir() and any(kept.iterdir()) and best_record(run_dir) is None:
        aside = atomic.unused_name(kept.with_name(f"{FOLDER}.damaged"))
        kept.rename(aside)
        context.say(f"{FOLDER}/{RECORD} is damaged or missing: what lies beside it is kept in {aside.name}/")
    found = read_best(run_dir)
    if found is not None and found["step"] > step:
        context.say(f"{FOLDER}/ was kept at step {found['step']}, which this run has not reached: removed")
        shutil.rmtree(kept, ignore_errors=True)


def prove_best(context: Context, model: Any, held_out: HeldOut | None, last: Path) -> None:
    """Measure the loss of the kept file again, and say it.

    The adapter of `last` is on `model` before and after. Does nothing where nothing was kept, and where
    nothing was measured since the held-out samples changed. Raises DataError when it is another loss.
    """
    kept = read_best(context.run_dir)
    if not context.config.checkpoint.keep_best or held_out is None or kept is None:
        return
    if kept["validation_data"] != held_out.data:
        return
    path = context.run_dir / FOLDER / kept["file"]
    lora.remove_lora(model)
    proof.load_lora(context, model, path)
    again = measure(context, model, held_out, step=kept["step"], saves=True).validation_loss
    lora.remove_lora(model)
    proof.load_lora(context, model, last)
    loss = kept["validation_loss"]
    if abs(again - loss) > _TOLERANCE[context.dtype] * max(abs(loss), _SMALL):
        raise DataError(
            f"loaded from disk, the LoRA of step {kept['step']} has a held-out loss of {again:.6g},"
            f" in training it was {loss:.6g}",
            where=str(path),
            remedy="this is a defect of the trainer: please report it; the checkpoints stay",
        )
    context.say(f"best: step {kept['step']}, held-out loss {loss:.4g} (from its file {again:.4g}): {path}")
