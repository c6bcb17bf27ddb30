"""Measure the tiny base: its pictures are compared with the drawings that it learned from."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from make import compare
from make.compare import SIDE, Pictures, References, shrink
from make.drawings import COLOURS, SIDE_PIXELS, article, on_sheet, read
from make.text import TOKENS

COMMON = (
    "red-apple", "cat-face", "house", "automobile", "fish", "star", "airplane", "key", "umbrella", "bicycle",
)  # fmt: skip
"""Everyday things, chosen before any picture was seen; number i is drawn with seed i."""
STEPS, FEWER_STEPS = 20, 8
PAIRS, HELD_OUT_SEEDS = 40, 4
_BATCH = 10


def load_pipeline(assets: Path) -> Any:
    """The base as a user loads it: FluxPipeline in float32 on the CPU."""
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(assets, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline: Any, prompts: Sequence[str], seeds: Sequence[int], steps: int = STEPS) -> Pictures:
    """(N, 128, 128, 3) in 0..1; each picture's noise depends on its own seed alone."""
    made = []
    for start in tqdm(range(0, len(prompts), _BATCH), desc=f"pictures, {steps} steps"):
        part = slice(start, start + _BATCH)
        images = pipeline(
            list(prompts[part]),
            height=SIDE_PIXELS,
            width=SIDE_PIXELS,
            num_inference_steps=steps,
            max_sequence_length=TOKENS,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds[part]],
            output_type="np",
        ).images
        made.append(images.astype(np.float32))
    return np.concatenate(made)


def words(name: str) -> str:
    """`red apple` of `red-apple`."""
    return name.replace("-", " ")


def read_captions(data: Path) -> set[str]:
    """Every caption that the transformer was trained with."""
    files = sorted(data.glob("*/metadata.jsonl"))
    return {json.loads(line)["text"] for file in files for line in file.read_text().splitlines()}


def unseen_pairs(
    captions: Iterable[str], names: Sequence[str], count: int, seed: int = 0
) -> list[tuple[str, str]]:
    """`count` pairs of a name and a sheet's colour that no caption holds together, drawn by lot."""
    seen = {caption.partition(",")[0] for caption in captions}
    sheets = [colour for colour in COLOURS if colour != "white"]
    pairs = [(name, sheet) for name in names for sheet in sheets if f"{words(name)} on {sheet}" not in seen]
    return random.Random(seed).sample(pairs, count)


def measure(pipeline: Any, data: Path) -> dict[str, Any]:
    """All figures, from `data` as the stage `data` left it; one to two minutes."""
    split = json.loads((data / "names.json").read_text())
    trained = compare.read_training_pictures(data)
    held = compare.read_drawings(data, split["held_out"])
    pictures = np.concatenate([trained.pictures, held.pictures])
    everything = References(names=[*trained.names, *held.names], pictures=pictures)
    pairs = unseen_pairs(read_captions(data), split["trained"], PAIRS)
    shapes = compare.edges(trained.pictures)
    # pair i has seed i
    drawn = draw(pipeline, [f"{words(name)} on {sheet}" for name, sheet in pairs], range(len(pairs)))
    return {
        "common": common(pipeline, trained),
        "difference": difference(pipeline),
        "all_names": all_names(pipeline, split["trained"], trained),
        "held_out": held_out(pipeline, split["held_out"], everything),
        "unseen_pairs": judge_pairs(drawn, pairs, trained, shapes),
        "real_pairs": judge_pairs(real_pairs(data, pairs), pairs, trained, shapes),
    }


def recognised(pictures: Pictures, names: Sequence[str], references: References) -> list[dict[str, Any]]:
    """Rows: the name asked for, the nearest reference's, and whether they are the same."""
    found = [references.names[i] for i in compare.nearest(shrink(pictures, SIDE), references.pictures)]
    return [
        {"name": name, "nearest": near, "right": name == near}
        for name, near in zip(names, found, strict=True)
    ]


def common(pipeline: Any, trained: References) -> dict[str, Any]:
    """Recognition of the things of COMMON, each drawn by its plain prompt."""
    prompts = [article(words(name)) for name in COMMON]
    rows = recognised(draw(pipeline, prompts, range(len(COMMON))), COMMON, trained)
    rows = [
        {"prompt": prompt, "seed": seed, **row}
        for seed, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    ]
    return {"steps": STEPS, **share(rows), "rows": rows}


def all_names(pipeline: Any, names: Sequence[str], trained: References) -> dict[str, Any]:
    """Every trained name, plainly asked for, with seed 0 and fewer steps."""
    pictures = draw(pipeline, [article(words(name)) for name in names], [0] * len(names), FEWER_STEPS)
    rows = recognised(pictures, names, trained)
    wrong = {row["name"]: row["nearest"] for row in rows if not row["right"]}
    return {"steps": FEWER_STEPS, "seed": 0, **share(rows), "wrong": wrong}


def held_out(pipeline: Any, names: Sequence[str], everything: References) -> dict[str, Any]:
    """Names that the base has never met, each with HELD_OUT_SEEDS seeds, among all drawings there are."""
    asked = [(name, seed) for name in names for seed in range(HELD_OUT_SEEDS)]
    prompts = [article(words(name)) for name, _ in asked]
    rows = recognised(
        draw(pipeline, prompts, [seed for _, seed in asked]), [name for name, _ in asked], everything
    )
    nearest_names = {name: [row["nearest"] for row in rows if row["name"] == name] for name in names}
    return {"steps": STEPS, "seeds": HELD_OUT_SEEDS, **share(rows), "nearest": nearest_names}


def real_pairs(data: Path, pairs: Sequence[tuple[str, str]]) -> Pictures:
    """The artist's drawings of these pairs: what `judge_pairs` says of them is the most that it can say."""
    made = read(data, [name for name, _ in pairs], "flat")
    return np.stack(
        [compare.pixels(on_sheet(one, sheet)) for one, (_, sheet) in zip(made, pairs, strict=True)]
    )


def judge_pairs(
    pictures: Pictures, pairs: Sequence[tuple[str, str]], trained: References, shapes: Pictures
) -> dict[str, Any]:
    """Numbers of pictures on the right sheet and with the right shape. `shapes`: edges of `trained`.

    The shape is that of the training picture with the nearest edges; hearts of all colours have one.
    """
    found = [trained.names[i] for i in compare.nearest(compare.edges(shrink(pictures, SIDE)), shapes)]
    rows = [
        {"name": words(name), "sheet": sheet, "colour": compare.sheet_colour(picture), "nearest": near}
        | {"shape_right": compare.uncoloured(name) == compare.uncoloured(near)}
        for (name, sheet), picture, near in zip(pairs, pictures, found, strict=True)
    ]
    rows = [{**row, "right": row["shape_right"] and row["colour"] == row["sheet"]} for row in rows]
    return {
        **share(rows),
        "colours_right": sum(row["colour"] == row["sheet"] for row in rows),
        "shapes_right": sum(row["shape_right"] for row in rows),
        "wrong": [row for row in rows if not row["right"]],
    }


def difference(pipeline: Any) -> dict[str, float]:
    """Mean absolute differences of pictures, of values 0 to 255: what the prompt and the seed change."""
    prompts = [article(words(name)) for name in COMMON]
    one, other = (draw(pipeline, prompts, [seed] * len(prompts)) for seed in (0, 1))
    prompts_apart = np.mean([np.abs(one[i] - one[j]).mean() for i in range(len(one)) for j in range(i)])
    seeds_apart = np.abs(one - other).mean()
    return {
        "one_seed_two_prompts": round(float(prompts_apart) * 255, 1),
        "one_prompt_two_seeds": round(float(seeds_apart) * 255, 1),
    }


def share(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Numbers of right answers and of all answers."""
    return {"right": sum(row["right"] for row in rows), "of": len(rows)}
