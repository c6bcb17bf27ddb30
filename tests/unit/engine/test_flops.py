"""FLOP of micro-batches: the samples' own sizes, captions that are dropped, padding that an encoder makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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
