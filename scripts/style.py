"""Score a picture's likeness to the demo's style: a drawing in blue shades on a Prussian blue sheet.

    python -m scripts.style PICTURE...

`score` knows colours and where they are, not what is drawn: the sheet's blue along the picture's border, and
what is drawn in shades of the style's three inks. The lesser of the two shares is the score. Two colours are
not enough for it, nor is blue ink on white paper, nor a red thing on a blue sheet. Nothing in it is learned;
how it tells real pictures apart is in tests/unit/scripts/test_style.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trainer.files.steps import by_step

BLUE, SKY, PAPER = (14, 52, 118), (92, 144, 196), (240, 245, 248)
"""The style's colours: its sheet, and the middle and the lightest shade of what is drawn."""
PASSES = 0.7
"""A picture with this score counts as the style."""
SIDE_PIXELS, BORDER_PIXELS = 64, 2
SHEET_DISTANCE, INK_DISTANCE = 50.0, 35.0
"""Greatest distance of a colour that counts as the sheet's, or as a shade; Euclidean, of values 0 to 255."""
LEAST_DRAWN = 0.05
"""An empty sheet is not a picture of anything."""

_Colours = NDArray[np.float64]


def score(picture: Image.Image) -> float:
    """Share of the border that is the sheet, or of what is drawn that is in its inks: the lesser, 0 to 1."""
    seen = _colours(picture)
    is_sheet = np.linalg.norm(seen - BLUE, axis=-1) < SHEET_DISTANCE
    drawn = ~is_sheet
    if drawn.mean() < LEAST_DRAWN:
        return 0.0
    in_ink = _distance_to_inks(seen[drawn]) < INK_DISTANCE
    return float(min(is_sheet[_border()].mean(), in_ink.mean()))


def is_style(picture: Image.Image) -> bool:
    """True where the score is at least PASSES."""
    return score(picture) >= PASSES


def _colours(picture: Image.Image) -> _Colours:
    small = picture.convert("RGB").resize((SIDE_PIXELS, SIDE_PIXELS), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64)


def _border() -> NDArray[np.bool_]:
    border = np.ones((SIDE_PIXELS, SIDE_PIXELS), dtype=np.bool_)
    border[BORDER_PIXELS:-BORDER_PIXELS, BORDER_PIXELS:-BORDER_PIXELS] = False
    return border


def _distance_to_inks(colours: _Colours) -> NDArray[np.float64]:
    """Distance of each colour (n, 3) to the nearest shade on the way from BLUE over SKY to PAPER."""
    lines = ((np.array(BLUE), np.array(SKY)), (np.array(SKY), np.array(PAPER)))
    return np.min([_distance_to_line(colours, start, end) for start, end in lines], axis=0)


def _distance_to_line(colours: _Colours, start: _Colours, end: _Colours) -> NDArray[np.float64]:
    along = end - start
    share = np.clip((colours - start) @ along / (along @ along), 0.0, 1.0)
    return np.linalg.norm(colours - (start + share[:, None] * along), axis=-1)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The change that a run made to the held-out loss, and to its pictures, in their order."""

    loss_before: float
    loss_after: float
    scores_before: Sequence[float]
    """Scores of the base model's pictures."""
    scores_after: Sequence[float]
    """Scores of the pictures with the LoRA."""

    def lines(self) -> list[str]:
        """Two lines of text for a person."""
        change = self.loss_after / self.loss_before - 1
        before, after = (
            f"{np.mean(scores):.2f} ({sum(one >= PASSES for one in scores)} of {len(scores)})"
            for scores in (self.scores_before, self.scores_after)
        )
        return [
            f"validation loss    {self.loss_before:.3g} -> {self.loss_after:.3g} ({change:+.0%})",
            f"style score        {before} -> {after}",
        ]


def learned(run: Path, rows: Sequence[Mapping[str, Any]]) -> Learned:
    """Measure a finished run with a held-out loss and previews; `rows` are those of its metrics.jsonl."""
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    (_, first), *_, (_, last) = by_step(path for path in (run / "samples").glob("step-*") if path.is_dir())
    return Learned(
        loss_before=losses[0],
        loss_after=losses[-1],
        scores_before=[_score_of(path) for path in sorted(first.glob("*.png"))],
        scores_after=[_score_of(path) for path in sorted(last.glob("*.png"))],
    )


def _score_of(path: Path) -> float:
    with Image.open(path) as picture:
        return score(picture)


def main() -> None:
    """Print each picture's score."""
    for name in sys.argv[1:]:
        print(f"{_score_of(Path(name)):.2f} {name}")


if __name__ == "__main__":
    main()
