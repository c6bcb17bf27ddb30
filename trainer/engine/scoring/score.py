"""Metrics of a set of generated pictures, by the prompts that they show and the pictures trained on."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image
from torch import Tensor

from trainer.config.value_types import FID_LEAST, KID_LEAST
from trainer.data.pictures.images import read_image
from trainer.engine.scoring import measures
from trainer.engine.scoring.models import OF_CLIP, Features, ScoringModel, loaded

METRICS = ("clip_t", "dinov2", "nearest_train", "diversity", "kid", "fid")
OF_TRAINING = frozenset({"dinov2", "nearest_train", "kid", "fid"})
"""Metrics that compare with the training pictures."""
_LEAST = {"kid": KID_LEAST, "fid": FID_LEAST}
_WHY = {
    "kid": "with fewer a subset has less than 25 pictures, whose values scatter widely",
    "fid": "its bias falls with their number only, and a covariance of d features needs more than d of them",
}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture to measure, or to measure by."""

    path: Path
    name: str
    """Its name in messages."""
    prompt: str | None = None
    content_sha256: str | None = None

    def opened(self) -> Image.Image:
        """The picture in RGB. Raises DataError."""
        return read_image(self.path, content_sha256=self.content_sha256)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A generated picture with the training picture that it is nearest to."""

    picture: str
    training: str
    cosine: float


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The metrics of a set of pictures."""

    pictures: int
    values: Mapping[str, float]
    """By metric; of `kid` also `kid_std`."""
    refused: Mapping[str, str]
    """Metrics that were asked for and would mean nothing, with the reason."""
    nearest: tuple[Copy, ...] = ()
    """Of every picture, where `nearest_train` is measured."""
    threshold: float = 1.0
    cut_prompts: int = 0
    """Prompts that are longer than CLIP reads."""

    @property
    def copies(self) -> tuple[Copy, ...]:
        """Pictures that are nearer to a training picture than the threshold."""
        return tuple(one for one in self.nearest if one.cosine > self.threshold)


@dataclass(kw_only=True)
class Scorer:
    """Measures sets of pictures, and keeps the features of the training pictures."""

    clip: ScoringModel | None
    dinov2: ScoringModel | None
    training: Sequence[Picture]
    threshold: float
    alive: Callable[[], None] = lambda: None
    """Runs between two batches, and may raise."""
    _training: Tensor | None = field(default=None, init=False)

    @functools.cached_property
    def identity(self) -> str:
        """Hash of the models and of the training pictures: other figures do not compare."""
        models = [one.identity for one in (self.clip, self.dinov2) if one is not None]
        pictures = sorted(one.content_sha256 or one.name for one in self.training)
        return hashlib.sha256("\n".join([*models, *pictures]).encode()).hexdigest()[:16]

    def scores(self, pictures: Sequence[Picture], metrics: Sequence[str]) -> Scores:
        """The metrics that have a meaning for these pictures, of which there is one at least.

        Raises DataError for a picture that cannot be read, AccessError for a model.
        """
        refused = {metric: why for metric in metrics if (why := self.obstacle(metric, pictures))}
        wanted = [metric for metric in metrics if metric not in refused]
        values: dict[str, float] = {}
        nearest: tuple[Copy, ...] = ()
        cut = 0
        if not OF_CLIP.isdisjoint(wanted):
            assert self.clip is not None, "a metric needs it"
            with loaded(self.clip) as features:
                prompts, cut = features.of_texts([one.prompt or "" for one in pictures], self.alive)
                values["clip_t"] = measures.clip_t(self._features(features, pictures), prompts)
        if set(wanted) - OF_CLIP:
            assert self.dinov2 is not None, "a metric needs it"
            with loaded(self.dinov2) as features:
                own = self._features(features, pictures)
                if self._training is None and not OF_TRAINING.isdisjoint(wanted):
                    self._training = self._features(features, self.training)
            values |= _values(wanted, own, self._training, [one.prompt for one in pictures])
            if "nearest_train" in wanted:
                assert self._training is not None
                nearest = self._nearest(pictures, own, self._training)
        values = {name: values[name] for name in (*METRICS[:5], "kid_std", "fid") if name in values}
        return Scores(
            pictures=len(pictures),
            values=values,
            refused=refused,
            nearest=nearest,
            threshold=self.threshold,
            cut_prompts=cut,
        )

    def obstacle(self, metric: str, pictures: Sequence[Picture]) -> str:
        """Why a metric of these pictures would mean nothing, in words; empty where it means something."""
        prompts = [one.prompt for one in pictures]
        counts = {"pictures": len(pictures), "training pictures": len(self.training)}
        least = _LEAST.get(metric, 0)
        if metric == "clip_t" and None in prompts:
            return "the pictures have no prompts"
        if metric == "diversity" and (None in prompts or len(set(prompts)) == len(prompts)):
            return "no prompt has two pictures: it compares seeds"
        if metric in OF_TRAINING and not self.training:
            return "there are no training pictures"
        for what, count in counts.items():
            if count < least:
                return f"{count:,} {what}, and {least:,} are needed: {_WHY[metric]}"
        return ""

    def _features(self, features: Features, pictures: Sequence[Picture]) -> Tensor:
        return features.of_pictures([one.opened for one in pictures], self.alive)

    def _nearest(self, pictures: Sequence[Picture], own: Tensor, training: Tensor) -> tuple[Copy, ...]:
        cosines, rows = measures.nearest(own, training)
        return tuple(
            Copy(picture=one.name, training=self.training[row].name, cosine=cosine)
            for one, cosine, row in zip(pictures, cosines, rows, strict=True)
        )


def _values(
    wanted: Sequence[str], own: Tensor, training: Tensor | None, prompts: Sequence[str | None]
) -> dict[str, float]:
    """The metrics of DINOv2's features, by name."""
    found: dict[str, float] = {}
    if "diversity" in wanted:
        distance = measures.diversity(own, prompts)
        assert distance is not None, "refused before"
        found["diversity"] = distance
    if training is None:
        return found
    if "dinov2" in wanted:
        found["dinov2"] = measures.likeness(own, training)
    if "nearest_train" in wanted:
        found["nearest_train"] = max(measures.nearest(own, training)[0], default=math.nan)
    if "kid" in wanted:
        subset = measures.kid_subset(len(own), len(training))
        found["kid"], found["kid_std"] = measures.kid(own, training, subset)
    if "fid" in wanted:
        found["fid"] = measures.fid(own, training)
    return found
