"""Metrics of a run's previews, read from the files that they were saved to."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence

from trainer.data.records import ImageRecord
from trainer.engine.caching.entries import Prompt
from trainer.engine.caching.samples import Samples
from trainer.engine.context import Context
from trainer.engine.scoring.models import models_of
from trainer.engine.scoring.score import Picture, Scorer, Scores
from trainer.engine.training.preview import preview_path
from trainer.engine.training.state import Run
from trainer.errors import DataError
from trainer.telemetry.sinks.records import ScoreRecord
from trainer.telemetry.status import Phase
from trainer.words.plurals import numbered

_MOST_TOLD = 3
"""Copies of a round that are told one by one."""


def make_scorer(context: Context, samples: Samples) -> Scorer | None:
    """The models and pictures that `validation.metrics` needs; None without metrics, and on ranks but the
    first.

    Models that are not here are downloaded. Raises DataError where the training pictures are too few for a
    metric, and as `models.models_of`.
    """
    validation = context.config.validation
    if not validation.metrics or not context.ranks.first:
        return None

    def on_bytes(done: int, total: int) -> None:
        context.alive(Phase.LOAD)

    download = context.config.model.download != "never"
    models = models_of(validation, download=download, on_bytes=on_bytes)
    scorer = Scorer(
        clip=models.get("clip"),
        dinov2=models.get("dinov2"),
        training=training_pictures(samples),
        threshold=validation.copy_threshold,
        alive=functools.partial(context.alive, Phase.PREVIEW),
    )
    _require_meaning(context, scorer)
    return scorer


def training_pictures(samples: Samples) -> tuple[Picture, ...]:
    """The pictures that are trained on, each once, without those of regularisation sets."""
    found = {
        one.content_sha256: Picture(path=one.path, name=str(one.path), content_sha256=one.content_sha256)
        for one in samples.training
        if isinstance(one, ImageRecord) and not one.is_reg
    }
    return tuple(found.values())


def _require_meaning(context: Context, scorer: Scorer) -> None:
    """Raise DataError for a metric that would mean nothing in any round."""
    validation = context.config.validation
    previews = [
        Picture(path=preview_path(context, 0), name=str(number), prompt=prompt)
        for number, prompt in enumerate(validation.prompts)
    ]
    for metric in validation.metrics:
        why = scorer.obstacle(metric, previews)
        if why:
            raise DataError(
                f"{metric} would mean nothing: {why}",
                where="validation.metrics",
                remedy=f"leave {metric} out of validation.metrics",
            )


def score_previews(run: Run, step: int) -> ScoreRecord | None:
    """Measure the previews of `step`, record the metrics and say them; None where there is nothing to do.

    Raises DataError for a picture that cannot be read.
    """
    context, scorer, validation = run.context, run.scorer, run.context.config.validation
    if scorer is None:
        return None
    context.status.beat(Phase.PREVIEW)
    folder = preview_path(context, step).with_suffix("")
    previews = [
        Picture(path=folder / f"{number:02d}.png", name=f"{folder.name}/{number:02d}.png", prompt=prompt)
        for number, prompt in enumerate(validation.prompts)
    ]
    found = scorer.scores(previews, validation.metrics)
    record = ScoreRecord(
        step=step,
        pictures=found.pictures,
        score_data=_data(context, scorer, run.entries.prompts),
        copied=len(found.copies) if found.nearest else None,
        **found.values,
    )
    run.journal.log_scores(record)
    _tell(context, found, step)
    return record


def _data(context: Context, scorer: Scorer, prompts: Sequence[Prompt]) -> str:
    """Hash of everything that the metrics depend on besides the weights of what is trained."""
    validation = context.config.validation
    drawn: Mapping[str, object] = {
        name: vars(validation)[name]
        for name in ("prompts", "seed", "num_inference_steps", "guidance_scale", "resolution")
    }
    controls = [[one.content_sha256 for one in prompt.controls] for prompt in prompts]
    edits = {"controls": controls} if any(controls) else {}
    text = json.dumps({**drawn, **edits, "scorer": scorer.identity}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tell(context: Context, found: Scores, step: int) -> None:
    values = "  ".join(f"{name} {value:.4g}" for name, value in found.values.items())
    context.say(f"metrics of the {numbered(found.pictures, 'preview')} of step {step}: {values}")
    for one in found.copies[:_MOST_TOLD]:
        context.say(
            f"warning: preview {one.picture} is nearly the training picture {one.training}: cosine"
            f" {one.cosine:.4f}, above validation.copy_threshold {found.threshold:g}"
        )
    if len(found.copies) > _MOST_TOLD:
        context.say(f"warning: and {len(found.copies) - _MOST_TOLD} more of these previews")
    if found.cut_prompts and step == 0:
        too_long = numbered(found.cut_prompts, "prompt, which is", "prompts, which are")
        context.say(f"clip_t reads the beginning of {too_long} longer than CLIP reads")
