"""Tiny CLIP and DINOv2 models as transformers saves them, and pictures that they tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from tests.random_bases.common import clip_tokenizer
from trainer.modeling.vision import make_torchvision_importable

COLOURS = ("red", "green", "blue", "yellow", "black", "orange")
SHAPES = ("square", "disc", "bar", "cross", "frame")
SIDE = 32


def drawing(colour: str, shape: str) -> Image.Image:
    """A shape of a colour on white, 32 pixels wide."""
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    draw = ImageDraw.Draw(picture)
    match shape:
        case "square":
            draw.rectangle((8, 8, 23, 23), fill=colour)
        case "disc":
            draw.ellipse((4, 4, 27, 27), fill=colour)
        case "bar":
            draw.rectangle((0, 12, 31, 19), fill=colour)
        case "cross":
            draw.rectangle((0, 13, 31, 18), fill=colour)
            draw.rectangle((13, 0, 18, 31), fill=colour)
        case _:
            draw.rectangle((2, 2, 29, 29), outline=colour, width=4)
    return picture


PAIRS = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
CAPTIONS = tuple(f"a {colour} {shape}" for colour, shape in PAIRS)


def write_pairs(folder: Path) -> list[Path]:
    """30 pictures with their captions as a data set; gives the pictures."""
    folder.mkdir(parents=True)
    paths = []
    for number, ((colour, shape), caption) in enumerate(zip(PAIRS, CAPTIONS, strict=True)):
        path = folder / f"{number:02d}.png"
        drawing(colour, shape).save(path)
        path.with_suffix(".txt").write_text(caption)
        paths.append(path)
    return paths


def write_clip(folder: Path, *, steps: int = 0) -> Path:
    """A CLIP of two layers, trained for so many steps on the 30 pairs by transformers' own loss."""
    make_torchvision_importable()
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    tokenizer = clip_tokenizer()
    own = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    special["pad_token_id"] = tokenizer.pad_token_id
    text = {**own, **special, "vocab_size": len(tokenizer), "max_position_embeddings": 24}
    torch.manual_seed(0)
    model = CLIPModel(
        CLIPConfig(
            text_config=text, vision_config={**own, "image_size": SIDE, "patch_size": 8}, projection_dim=32
        )
    )
    processor = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    if steps:
        _train(model, processor, tokenizer, steps)
    for part in (model, processor, tokenizer):
        part.save_pretrained(folder)
    return folder


def _train(model: Any, processor: Any, tokenizer: Any, steps: int) -> None:
    pixels = processor(images=[drawing(*pair) for pair in PAIRS], return_tensors="pt")["pixel_values"]
    texts = tokenizer(list(CAPTIONS), padding=True, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        loss = model(
            input_ids=texts["input_ids"],
            attention_mask=texts["attention_mask"],
            pixel_values=pixels,
            return_loss=True,
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def write_dinov2(folder: Path) -> Path:
    """A DINOv2 of two layers with random weights, wide enough that pictures differ."""
    make_torchvision_importable()
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    torch.manual_seed(1)
    config = Dinov2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        initializer_range=0.5,
        layerscale_value=1.0,
    )
    Dinov2Model(config).save_pretrained(folder)
    BitImageProcessor(
        do_resize=True,
        size={"height": 28, "width": 28},
        do_center_crop=False,
        image_mean=[0.485, 0.456, 0.406],
        image_std=[0.229, 0.224, 0.225],
    ).save_pretrained(folder)
    return folder


def noise(folder: Path, seeds: Sequence[int]) -> list[Path]:
    """Pictures of coarse noise, one a seed."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for seed in seeds:
        values = torch.randint(0, 256, (4, 4, 3), generator=torch.Generator().manual_seed(seed))
        picture = Image.fromarray(values.to(torch.uint8).numpy())
        paths.append(folder / f"{seed:03d}.png")
        picture.resize((SIDE, SIDE), Image.Resampling.NEAREST).save(paths[-1])
    return paths
