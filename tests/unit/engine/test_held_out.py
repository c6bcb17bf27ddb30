"""The kept LoRA of the lowest held-out loss: a kill at any moment leaves a whole one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import killed
from trainer.engine.records.resume import put_back
from trainer.engine.results import proof
from trainer.engine.training import held_out
from trainer.errors import DataError
from trainer.telemetry.sinks.records import ValidationRecord, written_values
from trainer.telemetry.status import Phase


def context(run_dir: Path, *, wanted: bool = True) -> Any:
    config = SimpleNamespace(checkpoint=SimpleNamespace(keep_best=wanted), method="lora")
    return SimpleNamespace(run_dir=run_dir, config=config, say=lambda text: None)


def record(step: int, loss: float, data: str = "a") -> ValidationRecord:
    return ValidationRecord(step=step, validation_loss=loss, validation_data=data)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter is a number, written as two files."""

    def write(name: str) -> Callable[[Any, int, Path], Path]:
        def call(context: Any, model: int, folder: Path) -> Path:
            (folder / name).write_text(str(model))
            return folder / name

        return call

    monkeypatch.setattr(proof, "write_lora", write("x.safetensors"))
    monkeypatch.setattr(proof, "write_twin", write("x.comfyui.safetensors"))
    monkeypatch.setattr(proof, "require_written", lambda *_: None)


def kept(run_dir: Path) -> tuple[int, float] | None:
    """Step and loss of what is kept, whose files are those of that step."""
    found = held_out.read_best(run_dir)
    if found is None:
        return None
    files = sorted((run_dir / held_out.FOLDER).glob("*.safetensors"))
    assert [path.read_text() for path in files] == [str(found["step"])] * 2
    assert sorted(path.name for path in run_dir.iterdir()) == [held_out.FOLDER]
    return found["step"], found["validation_loss"]


def test_only_a_lower_loss_on_the_same_samples_takes_the_place(tmp_path: Path) -> None:
    for step, loss, data, after in (
        (1, 2.0, "a", (1, 2.0)),
        (2, 2.0, "a", (1, 2.0)),
        (3, 1.5, "a", (3, 1.5)),
        (4, float("nan"), "a", (3, 1.5)),
        (5, 9.0, "b", (5, 9.0)),
    ):
        held_out.keep_best(context(tmp_path), step, record(step, loss, data))
        assert kept(tmp_path) == after
    held_out.keep_best(context(tmp_path, wanted=False), 6, record(6, 0.1, "b"))
    assert kept(tmp_path) == (5, 9.0)
    held_out.restore_best(context(tmp_path), 0)
    assert held_out.read_best(tmp_path) is None


def test_a_lora_that_reads_back_otherwise_ends_no_run_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out.keep_best(context(tmp_path), 1, record(1, 2.0))

    def differs(*_: object) -> None:
        raise DataError("the file read back from disk is not what was written")

    said: list[str] = []
    told = context(tmp_path)
    told.say = said.append
    with monkeypatch.context() as patch:
        patch.setattr(proof, "write_twin", differs)
        held_out.keep_best(told, 2, record(2, 1.0))
    why = "the file read back from disk is not what was written"
    assert said == [f"the LoRA of step 2 is not kept as the best: {why}"]
    assert kept(tmp_path) == (1, 2.0)


def keep(step: int, loss: float) -> Callable[[Path], None]:
    return lambda run_dir: held_out.keep_best(context(run_dir), step, record(step, loss))


def start_again(run_dir: Path) -> None:
    put_back(run_dir, lambda text: None)
    held_out.restore_best(context(run_dir), 2)


def test_a_kill_at_any_moment_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    seen = set()
    for run_dir in killed.at_each_change(keep(2, 1.0), keep(1, 2.0), tmp_path):
        start_again(run_dir)
        seen.add(kept(run_dir))
    assert seen == {(1, 2.0), (2, 1.0)}


def test_a_kill_of_the_first_one_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    seen = set()
    for run_dir in killed.at_each_change(keep(2, 1.0), lambda run_dir: None, tmp_path):
        start_again(run_dir)
        seen.add(kept(run_dir))
    assert seen == {None, (2, 1.0)}


@pytest.mark.parametrize(
    ("names", "found"), [(("old",), (1, 2.0)), (("old", "tmp"), (2, 1.0)), (("tmp",), (2, 1.0))]
)
def test_what_a_kill_of_an_earlier_version_left_is_kept(
    tmp_path: Path, names: tuple[str, ...], found: tuple[int, float]
) -> None:
    """It gave the older folder another name for a moment."""
    for name in names:
        keep(*((1, 2.0) if name == "old" else (2, 1.0)))(tmp_path)
        (tmp_path / "best").rename(tmp_path / f"best.{name}")
    start_again(tmp_path)
    assert kept(tmp_path) == found


def test_a_loss_on_other_samples_is_not_measured_again(tmp_path: Path) -> None:
    """A finished run that is started again after its held-out images changed."""
    held_out.keep_best(context(tmp_path), 1, record(1, 2.0, "a"))
    samples: Any = SimpleNamespace(data="b")
    # it has no model to measure with
    held_out.prove_best(context(tmp_path), None, samples, tmp_path / "last.safetensors")


def test_the_kept_one_is_measured_without_a_step_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step is long past: who follows the run would see it train again from there."""
    beats: list[tuple[Phase, int | None]] = []

    def beat(phase: Phase, *, step: int | None = None, total: int | None = None) -> None:
        beats.append((phase, step))

    def nothing(*_: object) -> None:
        pass

    one = torch.ones(())
    monkeypatch.setattr(held_out, "load_batch", lambda *_, **__: SimpleNamespace(weight=1.0))
    monkeypatch.setattr(held_out, "draw_for", nothing)
    monkeypatch.setattr(held_out, "to_device", lambda batch, draw, *_: (batch, draw))
    monkeypatch.setattr(held_out, "_scores", lambda *_: (one, []))
    monkeypatch.setattr(proof, "load_lora", nothing)
    monkeypatch.setattr(held_out.lora, "remove_lora", nothing)
    held_out.keep_best(context(tmp_path), 80, record(80, 1.0))
    ends: Any = context(tmp_path)
    ends.config.train = SimpleNamespace(max_train_steps=240)
    ends.family = ends.plan = SimpleNamespace(in_rows=False)
    ends.device, ends.dtype, ends.status = "cpu", torch.float32, SimpleNamespace(beat=beat)
    samples: Any = SimpleNamespace(data="a", settings=None, entries=SimpleNamespace(records=[0, 1]))
    model: Any = SimpleNamespace(training=False, eval=nothing, train=nothing)
    held_out.prove_best(ends, model, samples, tmp_path / "last.safetensors")
    assert beats == [(Phase.SAVE, None)] * 2


@pytest.mark.parametrize(
    ("kept_loss", "again", "same"),
    [(3e-5, 3.2e-5, True), (3e-5, 5e-4, False), (0.5, 0.508, True), (0.5, 0.52, False)],
)
def test_what_rounding_leaves_of_a_tiny_loss_is_no_share_of_it(
    kept_loss: float, again: float, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out.keep_best(context(tmp_path), 80, record(80, kept_loss))
    monkeypatch.setattr(held_out, "measure", lambda *_, **__: record(80, again))
    monkeypatch.setattr(proof, "load_lora", lambda *_: None)
    monkeypatch.setattr(held_out.lora, "remove_lora", lambda *_: None)
    ends: Any = SimpleNamespace(**vars(context(tmp_path)), dtype=torch.bfloat16)
    samples: Any = SimpleNamespace(data="a")
    problem = contextlib.nullcontext() if same else pytest.raises(DataError, match="this is a defect")
    with problem:
        held_out.prove_best(ends, None, samples, tmp_path / "last.safetensors")


def test_a_file_that_somebody_took_is_not_kept(tmp_path: Path) -> None:
    held_out.keep_best(context(tmp_path), 1, record(1, 2.0))
    (tmp_path / held_out.FOLDER / "x.safetensors").unlink()
    assert held_out.read_best(tmp_path) is None
    held_out.keep_best(context(tmp_path), 2, record(2, 3.0))
    assert kept(tmp_path) == (2, 3.0)


def test_what_was_kept_after_the_step_that_a_run_goes_on_from_is_removed(tmp_path: Path) -> None:
    said: list[str] = []
    run: Any = SimpleNamespace(**{**vars(context(tmp_path)), "say": said.append})
    held_out.keep_best(run, 300, record(300, 1.0))
    held_out.restore_best(run, 300)
    assert kept(tmp_path) == (300, 1.0)
    said.clear()
    held_out.restore_best(run, 250)
    assert list(tmp_path.iterdir()) == []
    assert said == ["best/ was kept at step 300, which this run has not reached: removed"]


def test_the_lora_of_the_step_that_a_run_goes_on_from_takes_the_place_of_a_removed_one(
    tmp_path: Path,
) -> None:
    """With another learning rate no later one may be as low again."""
    said: list[str] = []
    run: Any = SimpleNamespace(**{**vars(context(tmp_path)), "say": said.append})
    samples: Any = SimpleNamespace(data="a")
    records = [record(0, 0.1), record(100, 3.0), record(150, 1.0, "b"), record(200, 2.0), record(250, 2.5)]
    rows = [written_values(one) for one in records]
    for one in (*records[1:], record(300, 1.0)):
        held_out.keep_best(run, one.step, one)
    held_out.restore_best(run, 200)
    assert kept(tmp_path) is None
    said.clear()
    assert held_out.lowest_now(run, rows[:4], samples, 200) == records[3]
    held_out.keep_best(run, 200, records[3])
    assert kept(tmp_path) == (200, 2.0)
    assert held_out.lowest_now(run, rows, samples, 250) is None  # it is there
    assert said == ["best so far: step 200, held-out loss 2"]
    held_out.restore_best(run, 0)
    assert held_out.lowest_now(run, rows, samples, 250) is None
    told = (
        "step 200 had the lowest held-out loss, 2, and its LoRA is gone: best/ is of the lowest from here on"
    )
    assert said[1:] == [told]
    for other in (None, SimpleNamespace(data="c")):
        assert held_out.lowest_now(run, rows, other, 200) is None
    unwanted: Any = context(tmp_path, wanted=False)
    assert held_out.lowest_now(unwanted, rows, samples, 200) is None
    assert said[1:] == [told]


@pytest.mark.parametrize("text", ["", '{"file": "x.saf', "[]", '{"file": "x.safetensors"}', '{"step": 1}'])
def test_a_damaged_record_is_kept_aside_with_its_lora(tmp_path: Path, text: str) -> None:
    said: list[str] = []
    run: Any = SimpleNamespace(**{**vars(context(tmp_path)), "say": said.append})
    held_out.keep_best(run, 1, record(1, 1.0))
    (tmp_path / "best" / "best.json").write_text(text)
    assert held_out.read_best(tmp_path) is None
    held_out.restore_best(run, 1)
    assert (tmp_path / "best.damaged" / "x.safetensors").read_text() == "1"
    assert "kept in best.damaged/" in said[-1]
    held_out.keep_best(run, 2, record(2, 2.0))
    assert held_out.read_best(tmp_path) is not None
