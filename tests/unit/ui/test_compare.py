"""Runs beside each other: what differs is said, equal prompts stand in one row, and no number is lost."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from tests.unit.ui import made
from trainer.telemetry.runs import Run, read_run
from trainer.ui.studio import Studio, UnknownIdError, identifier
from trainer.ui.views.comparing import exports
from trainer.ui.views.comparing.compare import CompareView, compare_view
from trainer.ui.views.comparing.curves import HEIGHT, WIDTH, Curve, aligned, curve, drawing, hours, ticks


def rows_of(folder: Path, rows: Sequence[dict[str, Any]]) -> Run:
    """The run with these lines in place of its own."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_run(folder)


def compared(studio: Studio, *names: str, **asked: Any) -> CompareView:
    return compare_view(studio, [identifier(studio.runs, studio.runs / name) for name in names], **asked)


def picture(colour: str) -> Image.Image:
    return Image.new("RGB", (32, 32), colour)


@pytest.fixture
def two(studio: Studio) -> tuple[Path, Path]:
    return made.make_run(studio.runs / "a", done=40), made.make_run(studio.runs / "b", done=20)


def test_settings_are_shown_where_they_differ_and_only_there(studio: Studio, two: tuple[Path, Path]) -> None:
    assert compared(studio, "a", "b").settings == (), "their folders alone differ"
    for folder, rank in zip(two, (8, 16), strict=True):
        with (folder / "config.resolved.yaml").open("a") as file:
            file.write(f"lora:\n  rank: {rank}\n  alpha: 8\n")
    with (two[1] / "config.resolved.yaml").open("a") as file:
        file.write("note: only here\n")
    found = {row.name: row.cells for row in compared(studio, "a", "b").settings}
    assert found == {"lora.rank": ("8", "16"), "note": ("-", "only here")}


def test_one_place_is_no_difference_however_it_is_written(
    studio: Studio, two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command line names shipped folders from where it was started, the studio from the root on; a link
    leads to the same place, and a name that is no path stays one.
    """

    def settings(*pairs: tuple[str, str]) -> dict[str, tuple[str, ...]]:
        for folder, (pictures, model) in zip(two, pairs, strict=True):
            text = (
                f"data:\n  sets:\n  - img_dir: {pictures}\nmodel:\n  pretrained_model_name_or_path: {model}\n"
            )
            (folder / "config.resolved.yaml").write_text(text)
        return {row.name: row.cells for row in compared(studio, "a", "b").settings}

    (tmp_path / "there/base").mkdir(parents=True)
    (tmp_path / "link").symlink_to("there")
    monkeypatch.chdir(tmp_path / "there")
    made.ended(two[0], 0)
    monkeypatch.chdir(tmp_path)
    made.ended(two[1], 0)
    there, name = tmp_path / "there", "black-forest-labs/FLUX.1-dev"
    assert settings(("cats", name), (f"{there}/cats", name)) == {}
    assert settings(("./cats/", "base"), ("link/cats", f"{there}/base")) == {}
    assert settings(("cats", name), ("cats", f"{there}/base")) == {
        "data.sets.0.img_dir": ("cats", "cats"),
        "model.pretrained_model_name_or_path": (name, f"{there}/base"),
    }
    (two[0] / "process.json").unlink()
    assert settings(("cats", name), (f"{there}/cats", name)) == {
        "data.sets.0.img_dir": ("cats", f"{there}/cats")
    }, "nobody knows where it was started"


def test_an_auto_is_no_difference_to_what_its_plan_decided(studio: Studio, two: tuple[Path, Path]) -> None:
    def settings(*texts: str) -> dict[str, tuple[str, ...]]:
        for folder, text in zip(two, texts, strict=True):
            path = folder / "config.resolved.yaml"
            kept = path.read_text().partition("features:")[0]
            path.write_text(f"{kept}features:\n  weights: {text}\n  loader: auto\n")
        return {row.name: row.cells for row in compared(studio, "a", "b").settings}

    assert settings("auto", "int8") == {}, "the plan of both has int8"
    assert settings("auto", "nf4") == {"features.weights": ("auto", "nf4")}
    plan = json.loads((two[0] / "plan.json").read_text())
    plan["decisions"][0]["value"] = "nf4"
    (two[0] / "plan.json").write_text(json.dumps(plan))
    assert settings("auto", "nf4") == settings("auto", "auto") == {}, "decisions have their own table"
    (two[0] / "plan.json").unlink()
    assert settings("auto", "nf4") == {"features.weights": ("auto", "nf4")}, "nobody knows what it became"


def test_decisions_of_plans_are_shown_where_they_differ(studio: Studio, two: tuple[Path, Path]) -> None:
    plan = json.loads((two[1] / "plan.json").read_text())
    plan["decisions"][0]["value"] = "bf16"
    (two[1] / "plan.json").write_text(json.dumps(plan))
    found = compared(studio, "a", "b")
    assert [(row.name, row.cells) for row in found.decisions] == [("weights", ("int8", "bf16"))]
    predicted = [one.predicted for one in found.runs[0].compared]
    assert predicted == [0.5, 16 * 2**30], "250 ms by two micro-batches, 12 and 4 GiB"


def test_hours_are_the_time_of_all_steps_so_far(two: tuple[Path, Path]) -> None:
    run = rows_of(two[0], [
        {"step": 10, "loss": 1.0, "seconds_per_step": 360.0},
        {"step": 20, "validation_loss": 0.9},
        {"step": 30, "loss": 0.8, "seconds_per_step": 180.0},
        {"step": 31, "validation_loss": 0.7},
    ])  # fmt: skip
    assert hours(run) == [(10, 1.0), (30, 2.0)]
    found = curve(run, "hours")
    assert found.loss == ((1.0, 1.0), (2.0, 0.8))
    assert found.held_out == ((1.0, 0.9), (2.0, 0.7)), "at the log step before it"
    assert curve(run, "steps").loss == ((10, 1.0), (30, 0.8))


def test_a_long_run_is_drawn_by_some_of_its_own_points(two: tuple[Path, Path]) -> None:
    lines = [{"step": step, "loss": math.sin(step)} for step in range(1, 4001)]
    found = curve(rows_of(two[0], lines), "steps").loss
    steps = [int(step) for step, _ in found]
    assert len(found) == 500 and steps[0] == 1 and steps[-1] == 4000
    assert all(value == math.sin(step) for step, value in zip(steps, dict(found).values(), strict=True))
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    assert gaps == {8, 9}


def test_curves_share_an_axis_and_keep_every_point() -> None:
    ours = [Curve(loss=((1, 0.5), (3, 0.25)), held_out=((2, 0.75),)),
            Curve(loss=((2, 1.5), (3, math.nan)), held_out=())]  # fmt: skip
    found = json.loads(json.dumps(aligned(ours), allow_nan=False))
    assert found == {
        "x": [1, 2, 3],
        "loss": [[0.5, None, 0.25], [None, 1.5, None]],
        "held_out": [[None, 0.75, None], [None, None, None]],
    }


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_drawn_points_read_by_their_axes_are_the_losses(scale: float) -> None:
    """A reader who lays a ruler between two labels finds each loss, on a plain and a logarithmic axis."""
    loss = tuple((step, 0.1 + scale * math.exp(-step / 9)) for step in range(0, 60, 3))
    found = drawing([Curve(loss=loss, held_out=((30, 0.4),)), Curve(loss=(), held_out=())])
    assert found is not None and found.lines[1] == "" and len(found.dots[0]) == 1
    logarithmic = scale > 1

    def read(place: float, axis: Sequence[tuple[float, str]], curved: bool) -> float:
        (one, first), (other, last) = axis[0], axis[-1]
        low, high = (math.log(float(text)) if curved else float(text) for text in (first, last))
        value = low + (place - one) / (other - one) * (high - low)
        return math.exp(value) if curved else value

    drawn = [tuple(map(float, point.split(","))) for point in found.lines[0].split()]
    assert len(drawn) == len(loss)
    for (x, y), (step, value) in zip(drawn, loss, strict=True):
        assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT
        assert read(x, found.x_ticks, curved=False) == pytest.approx(step, abs=0.02)
        assert read(y, found.y_ticks, curved=logarithmic) == pytest.approx(value, rel=0.01, abs=0.01)


def test_curves_without_a_value_are_not_drawn() -> None:
    assert drawing([Curve(loss=(), held_out=()), Curve(loss=((1, math.nan),), held_out=())]) is None
    flat = drawing([Curve(loss=((0, 0.0),), held_out=())])
    assert flat is not None and flat.lines[0]


def test_labels_are_round_and_few() -> None:
    for low, high in [(0, 300), (0, 1), (0.18, 0.73), (0, 7.3e-5), (0, 98765), (2, 2.001), (0, 1e-9)]:
        found = ticks(low, high)
        assert 2 <= len(found) <= 6, (low, high, found)
        assert all(low - 1e-9 <= one <= high + 1e-9 for one in found)
        step = found[1] - found[0]
        digits = f"{step:.0e}"
        assert digits[0] in "125" and step == pytest.approx(float(digits)), found
    assert ticks(1.0, 1.0) == [1.0]


def test_a_row_of_previews_is_of_one_prompt(studio: Studio, two: tuple[Path, Path]) -> None:
    """The second run has the prompts in another order, and one that the first lacks."""
    made.samples(two[0], 10, [picture("red"), picture("blue")], ["owl", "cat"])
    made.samples(two[1], 10, [picture("blue"), picture("red"), picture("lime")], ["cat", "owl", "dog"])
    view = compared(studio, "a", "b")
    assert [row.prompt for row in view.grid] == ["owl", "cat", "dog"]
    for row in view.grid:
        for cell in filter(None, row.cells):
            with Image.open(cell.picture) as found:
                assert found.info["prompt"] == row.prompt
    assert view.grid[2].cells[0] is None
    assert view.grid_notes == ("Another prompt: A did not draw “dog”.",)


def drawn(folder: Path, step: int, **texts: str) -> None:
    """One preview with these texts."""
    made.samples(folder, step, [picture("red")], [texts.pop("prompt", "owl")])
    path = folder / f"samples/step-{step:06d}/00.png"
    with Image.open(path) as opened:
        info = made.PngInfo()
        for name, text in {"prompt": opened.info["prompt"], **texts}.items():
            info.add_itxt(name, text)
        opened.save(path, pnginfo=info)


def test_other_seeds_and_settings_are_said(studio: Studio, two: tuple[Path, Path]) -> None:
    drawn(two[0], 10, seed="0", guidance_scale="3.5", width="128")
    drawn(two[1], 10, seed="7", guidance_scale="3.5")
    assert compared(studio, "a", "b").grid_notes == (
        "Another seed: A 0, B 7.",
        "Another width: A 128, B not recorded.",
    )


def test_without_a_step_of_training_in_common_each_runs_last_is_shown(
    studio: Studio, two: tuple[Path, Path], client: TestClient
) -> None:
    for folder in two:
        drawn(folder, 0, seed="3")
    assert compared(studio, "a", "b").step == 0, "there are no others"
    for step in (10, 20):
        drawn(two[0], step, seed="3")
    drawn(two[1], 15, seed="3")
    view = compared(studio, "a", "b")
    assert (view.step, view.steps, view.neighbours) == (None, (0, 10, 15, 20), (None, None))
    assert [cell.step for cell in view.grid[0].cells if cell] == [20, 15]
    told = "No step of training with previews of all: each run's last, A at step 20, B at step 15."
    assert view.grid_notes == (told,)
    for path in ("", "/comparison.html"):
        text = client.get(f"/compare{path}?{view.query}&step=").text
        assert "Previews, each run's last" in text and "step 15, seed 3" in text
    assert compared(studio, "a", "b", step=0).step == 0, "it is shown where it is asked for"


def test_equal_previews_need_no_note(studio: Studio, two: tuple[Path, Path]) -> None:
    for folder in two:
        drawn(folder, 10, seed="3")
    assert compared(studio, "a", "b").grid_notes == ()


def test_the_last_step_that_all_have_is_shown_first(studio: Studio, two: tuple[Path, Path]) -> None:
    for step in (10, 20, 30):
        drawn(two[0], step)
    drawn(two[1], 20)
    view = compared(studio, "a", "b")
    assert (view.step, view.steps, view.neighbours) == (20, (10, 20, 30), (10, 30))
    view = compared(studio, "a", "b", step=30)
    assert view.step == 30 and view.neighbours == (20, None)
    assert view.grid_notes == ("No previews at step 30: B.",)
    assert compared(studio, "a", "b", step=11).step == 20, "a step without previews is none"
    assert compared(studio, "b", "b").neighbours == (None, None)


def test_answers_of_language_models_are_shown_as_text(
    studio: Studio, two: tuple[Path, Path], tmp_path: Path
) -> None:
    for folder in two:
        drawn(folder, 10)
    (two[0] / "samples/step-000010/00.txt").write_text("it purrs")
    (row,) = compared(studio, "a", "b").grid
    assert row.answers == ("it purrs", "")
    (tmp_path / "secret.txt").write_text("the secret words")
    (two[1] / "samples/step-000010/00.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UnknownIdError):
        compared(studio, "a", "b")


def test_metrics_of_unequal_data_are_said_not_to_compare(studio: Studio, two: tuple[Path, Path]) -> None:
    for folder, hashed in zip(two, ("x", "x"), strict=True):
        rows_of(folder, [{"step": 5, "validation_loss": 0.5, "validation_data": hashed},
                         {"step": 5, "clip_t": 0.3, "score_data": "s"}])  # fmt: skip
    view = compared(studio, "a", "b")
    assert {row.name: row.cells for row in view.metrics} == {
        "held-out loss": ("0.5 at step 5", "0.5 at step 5"),
        "clip_t": ("0.3 at step 5", "0.3 at step 5"),
    }
    assert view.metric_notes == ()
    rows_of(two[1], [{"step": 5, "validation_loss": 0.5, "validation_data": "y"}])
    (note,) = compared(studio, "a", "b").metric_notes
    assert note.startswith("Held-out losses") and "do not compare" in note


def test_the_csv_of_numbers_has_every_line_and_digit(studio: Studio, two: tuple[Path, Path]) -> None:
    text = exports.numbers_csv(studio, [read_run(folder) for folder in two])
    read = list(csv.DictReader(io.StringIO(text)))
    lines = [(name, json.loads(line)) for name, folder in zip("ab", two, strict=True)
             for line in (folder / "metrics.jsonl").read_text().splitlines()]  # fmt: skip
    assert len(read) == len(lines) == 6
    for row, (name, line) in zip(read, lines, strict=True):
        assert (row["run"], int(row["step"])) == (name, line["step"])
        for key in ("loss", "grad_norm", "seconds_per_step", "validation_loss"):
            assert (float(row[key]) if row[key] else None) == line.get(key)


def test_the_csv_of_the_table_is_no_formula(studio: Studio, two: tuple[Path, Path]) -> None:
    for folder, word in zip(two, ("=HYPERLINK(1)", "-1e-4"), strict=True):
        with (folder / "config.resolved.yaml").open("a") as file:
            file.write(f"word: '{word}'\n")
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(exports.table_csv(compared(studio, "a", "b"))))}
    assert rows["word"] == ["'=HYPERLINK(1)", "-1e-4"]
    assert rows[""] == ["a", "b"]
    assert [float(one) for one in rows["Step, predicted, s"]] == [0.5, 0.5]


RECORD = {
    "title": "A beside B", "text": "The plans differ.", "command": "trainer compare a.yaml b.yaml",
    "machine": {"gpu": "NVIDIA H200", "cpu_cores": 8}, "columns": ["variant", "ms/step"],
    "rows": [["A", "1.0"], ["B", "2.0", "too many"]],
}  # fmt: skip


def test_records_of_comparisons_are_found_and_nothing_else(
    studio: Studio, two: tuple[Path, Path], tmp_path: Path
) -> None:
    (studio.runs / "compared").mkdir()
    (studio.runs / "compared/one.json").write_text(json.dumps(RECORD))
    bad = {
        "broken.json": "{", "list.json": "[]", "deep.json": "[" * 100_000, "empty.json": "",
        "other.json": json.dumps(RECORD | {"command": "python -m bench"}),
        "machine.json": json.dumps(RECORD | {"machine": "a text"}),
        "rows.json": json.dumps(RECORD | {"rows": 3}),
    }  # fmt: skip
    for name, text in bad.items():
        (studio.runs / name).write_text(text)
    (tmp_path / "outside.json").write_text(json.dumps(RECORD))
    (studio.runs / "link.json").symlink_to(tmp_path / "outside.json")
    (two[0] / "a.json").write_text(json.dumps(RECORD))
    (found,) = exports.records(studio)
    assert (found.name, found.machine) == ("compared/one.json", "NVIDIA H200")
    assert found.rows == (("A", "1.0"), ("B", "2.0"))


def test_an_unknown_run_is_told(studio: Studio, two: tuple[Path, Path]) -> None:
    with pytest.raises(UnknownIdError):
        compared(studio, "a", "gone")
