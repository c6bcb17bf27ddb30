"""FLOP of micro-batches: the samples' own sizes, captions that are dropped, padding that an encoder makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from trainer.config.schema import DataSet
from trainer.data.sets.scan import scan_images
from trainer.engine.training import flops
from trainer.families import get
from trainer.modeling.base.source import ModelSource

LENGTHS = {"long": 40, "short": 7, "empty": 3}


def made(family: str, base: Path) -> tuple[Any, Any]:
    """A context and the entries of two samples, of which the first has the longer text."""
    one = get(family)
    source = ModelSource(folder=base, identity="", revision=None, random_components=frozenset(), seed=0)
    config = SimpleNamespace(
        method="lora",
        model=SimpleNamespace(weights="pretrained", pretrained_model_name_or_path=str(base)),
        data=SimpleNamespace(max_sequence_length=16),
    )
    key = one.packed_by or one.caption or "prompt_embeds"
    sizes = ((64, 32), (32, 32))
    records = [SimpleNamespace(bucket_width=wide, bucket_height=tall, controls=()) for wide, tall in sizes]
    entries = SimpleNamespace(
        texts=[SimpleNamespace(key="long"), SimpleNamespace(key="short")],
        empties=[SimpleNamespace(key="empty")] * 2,
        headers={name: {key: (length, 8)} for name, length in LENGTHS.items()},
        latents=[SimpleNamespace(record=one) for one in records] if one.sample_kind == "image" else [],
    )
    return SimpleNamespace(family=one, config=config, source=source), entries


@pytest.mark.parametrize("family", ["flux1_dev", "qwen_image", "llama"])
def test_samples_count_as_they_are(
    family: str, tiny_base: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, int]] = []

    class Flops:
        def of(self, **size: int) -> float:
            asked.append(size)
            return float(size["tokens"])

    monkeypatch.setattr(flops, "model_flops", lambda *_: Flops())
    count = flops.counter(*made(family, tiny_base(family)))
    first, second, dropped = (
        SimpleNamespace(record=number, dropped=dropped)
        for number, dropped in ((0, False), (1, False), (1, True))
    )
    tokens = [16, 16, 16] if family == "flux1_dev" else [*LENGTHS.values()]
    batch: Any = [first, second, dropped]
    assert count(batch) == count(batch) == sum(tokens)
    pictures = family != "llama"
    wanted = [(tokens[0], 64), (tokens[1], 32)] + ([(tokens[2], 32)] if family != "flux1_dev" else [])
    assert [(size["tokens"], size.get("width", 0)) for size in asked] == [
        (length, wide if pictures else 0) for length, wide in wanted
    ]


def test_controls_count_as_they_are_encoded(
    tmp_path: Path, tiny_base: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its picture's size, and one of another."""
    asked: list[tuple[int, int]] = []

    class Flops:
        def of(self, *, controls: int, control_pixels: int, **others: int) -> float:
            asked.append((controls, control_pixels))
            return 1.0

    monkeypatch.setattr(flops, "model_flops", lambda *_: Flops())
    for kind, sizes in (("after", (64, 64)), ("before", (64, 32))):
        (tmp_path / kind).mkdir()
        for number, side in enumerate(sizes):
            Image.new("RGB", (side, side)).save(tmp_path / kind / f"{number}.png")
            (tmp_path / kind / f"{number}.txt").write_text("make it night")
    one = DataSet(img_dir=tmp_path / "after", control_dir=tmp_path / "before")
    scan = scan_images([one], resolution=512, multiple=16, trigger_word=None, controls=(1, 1))
    context, entries = made("flux1_kontext", tiny_base("flux1_kontext"))
    entries.latents = [SimpleNamespace(record=record) for record in scan.records]
    batch: Any = [SimpleNamespace(record=at, dropped=False) for at in (0, 1)]
    flops.counter(context, entries)(batch)
    assert asked == [(1, 512**2), (1, 1024**2)]
