"""The model card of the tiny base: README.md with its figures, pictures, thumbnails and licence."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image, ImageDraw, ImageFont

from make import compare, drawings, figures
from make.drawings import SIDE_PIXELS, STYLE_WORDS, article

HERE = Path(__file__).parent
HARDWARE = "one NVIDIA H200, torch 2.11"
COMPONENTS = ("transformer", "vae", "text_encoder", "text_encoder_2")
WAYS = (
    ("red apple", "green", "purple and yellow", "white ink on teal"),
    ("rocket", "black", "teal and pink", "yellow ink on purple"),
    ("cat face", "teal", "green and white", "white ink on black"),
    ("castle", "orange", "brown and yellow", "pink ink on brown"),
    ("sunflower", "purple", "red and white", "white ink on red"),
)
"""The sample grid, a column each: a thing, and colours; column number i is drawn with seed i."""
_THUMBNAIL_COLUMNS = 24
_CELL, _GAP, _TEXT = SIDE_PIXELS, 10, 50
_Rows = list[dict[str, float]]


def write(assets: Path, data: Path, logs: Path, run: Path) -> None:
    """README.md, figures.json, samples.png, curves.png, thumbnails.png and LICENSE, in `assets`.

    `data`, `logs` and `run` are folders of the earlier stages. Everything is drawn in float32 on the CPU.
    """
    pipeline = figures.load_pipeline(assets)
    captions = figures.read_captions(data)
    rows = {
        "vae": _read_rows(logs / "vae.jsonl"),
        "text": _read_rows(logs / "text.jsonl"),
        "transformer": _read_rows(run / "metrics.jsonl"),
    }
    training = {stage: _training(stage_rows) for stage, stage_rows in rows.items()}
    sample_grid(pipeline, captions).save(assets / "samples.png", optimize=True)
    curves(rows, training).savefig(assets / "curves.png", dpi=90)
    names = json.loads((data / "names.json").read_text())
    thumbnails(data, names["trained"]).save(assets / "thumbnails.png", optimize=True)
    found = {
        "components": {name: _size(pipeline, assets, name) for name in COMPONENTS},
        "training": training,
        "vae_psnr_db": {
            "trained": round(rows["vae"][-2]["psnr_db"], 1),
            "held_out": round(_held_out_psnr(pipeline.vae, data, names["vae_held_out"]), 1),
        },
        "data": _count(data, names, captions),
        **figures.measure(pipeline, data),
        "thumbnails": names["trained"],
    }
    (assets / "figures.json").write_text(json.dumps(found, indent=1) + "\n")
    template = Template((HERE / "card.md").read_text())
    (assets / "README.md").write_text(template.substitute(_words(found, names)))
    shutil.copy(HERE / "LICENSE.txt", assets / "LICENSE")


def sample_grid(pipeline: Any, captions: set[str]) -> Image.Image:
    """WAYS as pictures, each over its prompt and seed."""
    columns = [
        (
            article(thing),
            f"{thing}, ink style",
            f"{thing} on {sheet}",
            f"{thing} in {colours}",
            f"{thing}, {ink}",
        )
        for thing, sheet, colours, ink in WAYS
    ]
    cells = [(column[row], seed) for row in range(len(columns[0])) for seed, column in enumerate(columns)]
    pictures = figures.draw(pipeline, [prompt for prompt, _ in cells], [seed for _, seed in cells])
    # two thirds of the captions end in a word that says nothing
    met = captions | {caption.rpartition(",")[0] for caption in captions if caption.endswith(" style")}
    width, height = _CELL + _GAP, _CELL + _TEXT
    page = Image.new(
        "RGB", (_GAP + width * len(columns), _GAP + height * (len(cells) // len(columns))), "white"
    )
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(size=11)
    for number, ((prompt, seed), picture) in enumerate(zip(cells, pictures, strict=True)):
        left, top = _GAP + number % len(columns) * width, _GAP + number // len(columns) * height
        page.paste(Image.fromarray((picture * 255).round().astype(np.uint8)), (left, top))
        pen.rectangle((left - 1, top - 1, left + _CELL, top + _CELL), outline="#d1d9e0")
        note = f"seed {seed}" + ("" if prompt in met else ", not in training")
        text = "\n".join([*textwrap.wrap(prompt, 25), note])
        pen.multiline_text((left, top + _CELL + 2), text, fill="#1f2328", font=font, spacing=1)
    return page


def curves(rows: Mapping[str, _Rows], training: Mapping[str, Mapping[str, float]]) -> Any:
    """A matplotlib figure: the losses of the three trainings."""
    from matplotlib.figure import Figure

    panels = {
        "vae": ("VAE: mean absolute error", {"l1": "pixels in -1..1"}),
        "text": ("Text encoders: matching loss", {"clip": "CLIP", "t5": "T5"}),
        "transformer": ("Transformer: flow-matching loss", {"loss": "mean of 100 steps"}),
    }
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, (stage, (title, series)) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for key, label in series.items():
            points = [(row["step"], row[key]) for row in rows[stage] if key in row]
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel="step")
        axes.set_title(f"{title}\n{training[stage]['steps']} steps, {training[stage]['seconds']:.0f} s")
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend()
    return figure


def thumbnails(data: Path, names: Sequence[str]) -> Image.Image:
    """The flat drawing of every name on white, THUMBNAIL_SIDE squared, row by row in the order of `names`."""
    side = compare.THUMBNAIL_SIDE
    small = compare.shrink(compare.read_drawings(data, names, hands=("flat",)).pictures, side)
    page = Image.new("RGB", (side * _THUMBNAIL_COLUMNS, side * -(-len(names) // _THUMBNAIL_COLUMNS)), "white")
    for number, one in enumerate(small):
        place = number % _THUMBNAIL_COLUMNS * side, number // _THUMBNAIL_COLUMNS * side
        page.paste(Image.fromarray((one * 255).round().astype(np.uint8)), place)
    return page


def _read_rows(path: Path) -> _Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _training(rows: _Rows) -> dict[str, float]:
    """Steps and seconds of one training; a run by `trainer` says how long its steps took."""
    timed = [row for row in rows if "seconds_per_step" in row]
    if not timed:
        return {"steps": max(row.get("step", 0) for row in rows), "seconds": round(rows[-1]["seconds"])}
    starts = [0, *(row["step"] for row in timed)]
    seconds = sum(
        row["seconds_per_step"] * (row["step"] - start) for row, start in zip(timed, starts, strict=False)
    )
    return {"steps": timed[-1]["step"], "seconds": round(seconds)}  # fmt: skip


def _size(pipeline: Any, assets: Path, name: str) -> dict[str, float]:
    """Parameters, and MB of the file that they are in."""
    size = sum(path.stat().st_size for path in (assets / name).glob("*.safetensors"))
    count = sum(parameter.numel() for parameter in pipeline.components[name].parameters())
    return {"parameters": count, "mb": round(size / 1e6, 1)}


def _held_out_psnr(model: Any, data: Path, names: Sequence[str]) -> float:
    """The VAE's PSNR on held-out drawings by both hands on white, as the stage `vae` measures it."""
    from make import vae

    pictures = [one.picture for hand in ("flat", "ink") for one in drawings.read(data, names, hand)]
    with torch.inference_mode():
        return vae.peak_signal_to_noise(model, vae.on_white(vae.stack(pictures)), batch=16)


def _count(data: Path, names: Mapping[str, Sequence[str]], captions: set[str]) -> dict[str, int]:
    pictures = sum(len(list((data / part).glob("*.png"))) for part in ("plain", "ink", "coloured"))
    split = {f"{part}_names": len(listed) for part, listed in names.items()}
    return {**split, "pictures": pictures, "captions": len(captions)}


def _words(found: Mapping[str, Any], names: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The text for each placeholder of the template."""
    components = {
        f"{name}_{key}": f"{value:,}" if key == "parameters" else f"{value:.1f}"
        for name, size in found["components"].items()
        for key, value in size.items()
    }
    training = {
        f"{stage}_{key}": f"{value:,.0f}"
        for stage, row in found["training"].items()
        for key, value in row.items()
    }
    recognition = {
        f"{part}_{key}": str(value)
        for part in ("common", "all_names", "held_out", "unseen_pairs", "real_pairs", "difference")
        for key, value in found[part].items()
        if isinstance(value, int | float)
    }
    sizes = found["components"].values()
    settings = yaml.safe_load((HERE / "transformer.yaml").read_text())["train"]
    return {
        **components,
        **training,
        **recognition,
        **{f"data_{key}": f"{value:,}" for key, value in found["data"].items()},
        "parameters": f"{sum(size['parameters'] for size in sizes) / 1e6:.1f}",
        "megabytes": f"{sum(size['mb'] for size in sizes):.1f}",
        "minutes": f"{sum(row['seconds'] for row in found['training'].values()) / 60:.0f}",
        "batch": str(settings["train_batch_size"]),
        "hardware": HARDWARE,
        "psnr_trained": str(found["vae_psnr_db"]["trained"]),
        "psnr_held_out": str(found["vae_psnr_db"]["held_out"]),
        "style_words": ", ".join(STYLE_WORDS),
        "vae_held_out_names": ", ".join(map(figures.words, names["vae_held_out"])),
        "common_rows": _table(found["common"]["rows"], ("prompt", "seed", "nearest")),
        "held_out_rows": _table(_held_out_rows(found["held_out"]["nearest"]), ("name", "right", "nearest")),
    }


def _held_out_rows(nearest: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    return [
        {
            "name": figures.words(name),
            "right": list(near).count(name),
            "nearest": ", ".join(figures.words(other) for other in sorted(set(near))),
        }
        for name, near in nearest.items()
    ]


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Lines of a table in Markdown, without its head."""
    return "\n".join("| " + " | ".join(str(row[column]) for column in columns) + " |" for row in rows)
