"""Plots of the records: bars as long as the times, every row named, and the same bytes each time."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bench import page, plots, record
from bench.record import Record
from tests.unit.bench.test_bench import record_of, row
from trainer.telemetry.measurement import Table

RECORDS = {stem: one for stem, one in record.read_records().items() if isinstance(one, Record)}


def drawn(figure: Any) -> Image.Image:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    return Image.open(file).convert("RGB")


def test_bars_are_as_long_as_the_times() -> None:
    picture = drawn(plots.bars(record_of(row(milliseconds=50.0), row("diffusers", milliseconds=100.0))))

    def widest(colour: tuple[int, int, int]) -> int:
        pixels = picture.load()
        assert pixels is not None
        lines = range(picture.height)
        return max(sum(pixels[x, y] == colour for x in range(picture.width)) for y in lines)

    assert widest((0x09, 0x69, 0xDA)) == pytest.approx(widest((0x8C, 0x95, 0x9F)) / 2, abs=2)


@pytest.mark.parametrize("stem", RECORDS)
def test_every_row_is_named_inside_the_picture(stem: str) -> None:
    """The committed records: each bar has a label and its figures, each dot an entry of the legend."""
    measured = [one for one in RECORDS[stem].rows if one.milliseconds is not None]
    bars, dots = plots.bars(RECORDS[stem]), plots.scatter(RECORDS[stem])
    for figure in (bars, dots):
        drawn(figure)
        left, bottom, right, top = figure.bbox.extents
        (axes,) = figure.axes
        texts = [axes.title, *axes.texts, *figure.legends[0].get_texts()]
        # ticks of numbers may lie beyond the axis, and are not drawn there
        texts += axes.get_yticklabels() if figure is bars else []
        for text in texts:
            box = text.get_window_extent()
            assert left <= box.x0 and box.x1 <= right and bottom <= box.y0 and box.y1 <= top, text
    families = {one.family for one in measured}
    assert len(bars.axes[0].get_yticklabels()) == len(measured) + len(families)
    assert len({text.get_text() for text in bars.axes[0].get_yticklabels()}) >= len(families)
    names = [text.get_text() for text in dots.legends[0].get_texts()]
    assert len(names) == sum(one.allocated_gib is not None for one in measured)


def test_dots_have_a_colour_a_family_and_ours_are_filled() -> None:
    rows = [
        row(family=family, variant=variant, milliseconds=10.0, allocated_gib=5.0)
        for family in ("flux1_dev", "llama")
        for variant in ("ours-bf16", "diffusers")
    ]
    lines = plots.scatter(record_of(*rows)).axes[0].lines
    found = [(line.get_color(), line.get_markerfacecolor() == "none", line.get_marker()) for line in lines]
    ours, other = "#0969da", "#bf3989"
    assert found == [(ours, False, "o"), (ours, True, "s"), (other, False, "o"), (other, True, "s")]


def test_steps_of_several_gpus_are_drawn_as_work_beside_one_gpus() -> None:
    columns = ("family", "variant", "way", "GPUs", "of one")
    rows = [
        ("flux1_dev", "ours-fp8", "one", "1", "1.000"),
        ("flux1_dev", "ours-fp8", "replicated", "2", "1.000"),
        ("flux1_dev", "ours-fp8", "replicated", "4", "1.250"),
        ("flux1_dev", "ours-fp8", "sharded", "4", "1.600"),
        ("flux1_dev", "ours-fp8", "auto", "4", ""),  # one GPU was not measured beside it
    ]
    machine = record_of().machine
    table = Table(title="x", text="", machine=machine, command="", columns=columns, rows=tuple(rows))
    assert page.scaled(table)
    assert not page.scaled(dataclasses.replace(table, rows=tuple(rows[:2])))
    assert not page.scaled(dataclasses.replace(table, rows=tuple(rows[4:])))
    equal, *found = plots.scaling(table).axes[0].lines
    assert (list(equal.get_xdata()), list(equal.get_ydata())) == ([1, 4], [1, 4])
    assert {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in found} == {
        "flux1_dev fp8 replicated": {1: 1.0, 2: 2.0, 4: 3.2},
        "flux1_dev fp8 sharded": {1: 1.0, 4: 2.5},
    }


def test_a_picture_changes_where_what_it_shows_does(tmp_path: Path) -> None:
    one = record_of(row(milliseconds=50.0, allocated_gib=1.0), row("diffusers", milliseconds=100.0))
    written = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        plots.write_plots({"x": one}, folder)
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0] == written[1] and len(written[0]) == 2
    assert not any(b"Software" in content for content in written[0].values())
