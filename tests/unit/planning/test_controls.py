"""Control images in plans: their pixels and tokens beside those that a run makes of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.unit.planning.conftest import machine
from tests.unit.planning.test_resolve import Config, row
from trainer.config.reading.load import Loaded, with_settings
from trainer.config.schema import DataSet, RunConfig
from trainer.data.records import ImageRecord
from trainer.data.sets.scan import scan_images
from trainer.engine.training.flops import control_pixels as encoded_pixels
from trainer.errors import HardwareError
from trainer.families import get, names
from trainer.families.values import AttentionShape
from trainer.planning import planning
from trainer.planning.plan import Plan
from trainer.planning.planning import plan_run, run_attention
from trainer.planning.shapes.controls import control_pixels
from trainer.planning.shapes.geometry import Geometry
from trainer.planning.shapes.run_shapes import run_geometry, run_shape
from trainer.planning.shapes.set_look import Seen, alike, seen, shapes_of
from trainer.planning.shapes.shape_classes import shape_class

EDITING = [name for name in names() if get(name).control_counts[1]]
OWN, OTHER, BOTH = ((96, 96),), ((80, 80),), ((96, 96), (80, 80))
WHY = "control images count as 1024 x 1024 pixels"


def edits(folder: Path, controls: tuple[tuple[int, int], ...]) -> DataSet:
    """A set of square pictures of 96 pixels, one for each control of these sizes."""
    for kind in ("after", "before"):
        (folder / kind).mkdir(parents=True)
    for number, size in enumerate(controls):
        for kind, pixels in (("after", (96, 96)), ("before", size)):
            Image.new("RGB", pixels).save(folder / kind / f"{number}.png")
        (folder / "after" / f"{number}.txt").write_text("make it night")
    return DataSet(img_dir=folder / "after", control_dir=folder / "before")


def asked(config: Config, family: str, one: DataSet | None, **changes: Any) -> Loaded:
    sets = [{"img_dir": "/none", "control_dir": "/none/before"}] if one is None else [one.model_dump()]
    repository = "nobody/nothing-of-it-is-here"
    found = config(family=family, data={"sets": sets, "resolution": 512}, **changes)
    return with_settings(
        Loaded(config=found, sources={}), {"model.pretrained_model_name_or_path": repository}
    )


def planned(loaded: Loaded, **changes: Any) -> Plan:
    facts = dataclasses.replace(machine("h200"), verdicts=())
    return plan_run(with_settings(loaded, changes), facts, find_model=lambda _: None)


@pytest.mark.parametrize("family", EDITING)
@pytest.mark.parametrize("resolution", [512, 1024, 1536])
@pytest.mark.parametrize("controls", [OWN, OTHER, BOTH])
def test_controls_have_the_pixels_that_the_run_encodes(
    family: str, resolution: int, controls: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    one, used = edits(tmp_path, controls), get(family)
    scan = scan_images(
        [one], resolution=resolution, multiple=16, trigger_word=None, controls=used.control_counts
    )
    encoded = [encoded_pixels(one, used) for one in scan.records if isinstance(one, ImageRecord)]
    found = control_pixels(resolution, alike(seen((one,), used)))
    assert found.most == max(encoded) and found.mean == pytest.approx(sum(encoded) / len(encoded))
    assert bool(found.why) == (found.most > resolution**2) == (resolution == 512 and controls != OWN)


def test_controls_that_are_not_known_count_as_the_larger_of_both() -> None:
    assert [control_pixels(side, None)[:2] for side in (512, 1024, 1536)] == [
        (1024**2, 1024**2), (1024**2, 1024**2), (1536**2, 1536**2)
    ]  # fmt: skip
    assert "are not known" in control_pixels(512, None).why
    assert control_pixels(1024, None).why == control_pixels(1536, 0.5).why == ""


def test_a_share_counts_how_often_samples_come() -> None:
    looked: tuple[Seen, ...] = ((((8, 8), (8, 8)), 3.0, 2), (((8, 8), (8, 8), (4, 4)), 1.0, 1))
    assert alike(looked) == 7 / 8
    assert alike(((((8, 8),), 1.0, 1),)) is None is alike(())


def test_memory_and_time_are_those_of_the_controls_size(config: Config, tmp_path: Path) -> None:
    """Of three sets, and of one that is not here."""
    sets = {name: edits(tmp_path / name, sizes) for name, sizes in (("own", OWN), ("other", OTHER))}
    written = {"features.weights": "bf16", "features.activation_checkpointing": False}
    own, other, both, unknown = (
        planned(asked(config, "flux1_kontext", one), **written)
        for one in (*sets.values(), edits(tmp_path / "both", BOTH), None)
    )
    held = [next(part.bytes for part in one.train_memory if part.name == "activations") for one in
            (own, other, both, unknown)]  # fmt: skip
    # 512 tokens of text, 1,024 of the target, and as many of the control or 4,096
    assert held[1] / held[0] == pytest.approx((512 + 1024 + 4096) / (512 + 2 * 1024), rel=0.01)
    assert held[1] == held[2] == held[3]
    assert own.step_milliseconds < both.step_milliseconds < 0.8 * other.step_milliseconds
    assert other.step_milliseconds == unknown.step_milliseconds
    assert WHY not in row(own, "step_time").reason
    assert "this set has such" in row(other, "step_time").reason
    assert "the sizes of this set's are not known" in row(unknown, "step_time").reason


def test_a_refusal_says_that_controls_count_as_larger(config: Config, tmp_path: Path) -> None:
    written = {"features.memory_budget": "21GiB", "features.weights": "bf16", "features.block_swap": 0}
    least: dict[str, str] = {}
    for name, sizes in (("own", OWN), ("other", OTHER)):
        loaded = asked(config, "flux1_kontext", edits(tmp_path / name, sizes))
        with pytest.raises(HardwareError) as caught:
            planned(loaded, **written)
        least[name] = str(caught.value)
    assert WHY in least["other"] and WHY not in least["own"]


@pytest.mark.parametrize("controls", [OWN, OTHER])
def test_kernels_are_probed_at_the_planned_shape(
    config: Config, controls: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    loaded = asked(config, "qwen_image_edit", edits(tmp_path, controls))
    shape = run_attention(loaded, 1)
    assert isinstance(shape, AttentionShape)
    assert shape.tokens == 768 + 1024 + (1024 if controls == OWN else 4096)
    sized = planning._geometries(get("qwen_image_edit"), loaded, None, None)
    assert sized(loaded.config, "bf16").attention_shape_class == shape_class(shape)


def test_a_control_of_another_size_is_of_another_shape(tmp_path: Path) -> None:
    looked = seen((edits(tmp_path, BOTH),), get("flux1_kontext"))
    assert [len(shapes_of(looked, side, 16)) for side in (512, 1024)] == [2, 1]


def test_an_older_layout_is_planned_with_the_tokens_that_it_shows(config: Config, tmp_path: Path) -> None:
    """A caption of 512 tokens beside one control; what layouts show has a test beside the pipelines."""
    family, sets = get("qwen_image_edit"), [{"img_dir": "/after", "control_dir": "/before"}]
    run: RunConfig = config(family=family.name, data={"sets": sets, "max_sequence_length": 512})
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "QwenImageEditPipeline"}))
    tokens = [
        run_shape(run, family, bytes_per_value=2, model_folder=folder).text_tokens
        for folder in (None, tmp_path / "not-here", tmp_path)
    ]
    assert tokens == [768, 768, 2048]
    older = dataclasses.replace(family, control_tokens=lambda _: family.control_tokens(tmp_path))
    plus, single = (run_geometry(one, run, model_folder=None, dtype="bf16") for one in (family, older))
    assert usual_tokens(plus, 768) == 384 and usual_tokens(single, 2048) == 1536
    assert single.text_bytes_peak / plus.text_bytes_peak == pytest.approx(1400 / 512)
    assert single.activations.saved > plus.activations.saved


def usual_tokens(geometry: Geometry, longest: int) -> int:
    """Text tokens of usual length beside two pictures of 1024 pixels."""
    return round(geometry.usual_share * (8192 + longest)) - 8192


def test_only_the_family_that_sees_controls_reads_them_as_text() -> None:
    for name in names():
        assert bool(get(name).control_tokens(None)) == get(name).text_sees_controls
