"""A18: pictures of a try differ with the LoRA; equal seeds give equal bytes; strength 0 is the base."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.contract.conftest import Finished
from tests.contract.loaders import lora_file
from tests.contract.runs import CASES, CPU_FACTS, LORA_CASES, ROOT, Case, draws
from tests.contract.test_sample import with_controls
from tests.e2e.conftest import PATIENCE_SECONDS
from trainer.config.reading.load import Loaded
from trainer.engine import run
from trainer.engine.results.pictures import read_png
from trainer.errors import DataError
from trainer.families.loading import load_config
from trainer.machine.reading import read_recorded
from trainer.queue.adding import try_request
from trainer.queue.launcher import State
from trainer.queue.local import Local
from trainer.telemetry.run_folder import tries
from trainer.telemetry.run_folder.tries import Try
from trainer.telemetry.rundir import CONFIG_FILE

OWN = "own/lora-1/lora.safetensors"
"""A file under the name that the studio gives it."""
ONE = Try(
    prompts=("an owl", "a red car"),
    loras=("set by each test.safetensors",),
    seed=7,
    resolution=64,
    num_inference_steps=2,
)
FIRST = [CASES[0], next(case for case in LORA_CASES if not draws(case.family))]


def drawn(done: Finished, folder: Path, one: Try) -> list[bytes]:
    """The files of a try by the run's LoRA, column by column."""
    file, own = lora_file(done), folder / OWN
    shutil.copytree(file.parent, folder / "lora", dirs_exist_ok=True)
    shutil.copytree(file.parent, own.parent, dirs_exist_ok=True)
    (own.parent / file.name).replace(own)
    place = folder / "tries" / str(1 + len(list(folder.glob("tries/*"))))
    place.mkdir(parents=True)
    (place / tries.RECORD).write_text(tries.to_json(one))
    context = with_controls(done)
    loaded = tries.with_try(Loaded(config=context.config, sources={}), one)
    spec = dataclasses.replace(done.job.spec, mode="sample", try_folder=str(place))
    run.sample_once(dataclasses.replace(context, config=loaded.config), spec)
    count = range(1 + len(one.loras))
    return [tries.picture(place, column, row).read_bytes() for column in count for row in range(2)]


def changed(pictures: Sequence[bytes]) -> list[bool]:
    """Whether each picture of the second column differs from that of the first."""
    return [one != other for one, other in zip(pictures[:2], pictures[2:4], strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_with_and_without(case: Case, finished: Callable[[Case], Finished], tmp_path: Path) -> None:
    done = finished(case)
    last = f"lora/{lora_file(done).name}"
    one = dataclasses.replace(ONE, loras=(last,))
    if not draws(case.family):
        one = dataclasses.replace(one, resolution=None, num_inference_steps=None)
    first = drawn(done, tmp_path / "cats", one)
    assert any(changed(first)), "the LoRA changes what is drawn"
    assert drawn(done, tmp_path / "cats", one) == first, "equal seeds, equal bytes"
    without = drawn(done, tmp_path / "cats", dataclasses.replace(one, strength=0.0))
    assert without == [*first[:2], *first[:2]], "strength 0 is the base"
    half = drawn(done, tmp_path / "cats", dataclasses.replace(one, strength=0.5, loras=(OWN, last)))
    assert half[:2] == first[:2] and half[2:4] == half[4:], "a column knows nothing of the one before it"
    if draws(case.family):
        assert all(changed(first)) and half[2:4] != first[2:], "half of it is something between"
        other = drawn(done, tmp_path / "cats", dataclasses.replace(one, seed=8))
        assert all(a != b for a, b in zip(first, other, strict=True))
        picture, text = read_png(tmp_path / "cats/tries/1/1/01.png")
        assert (picture.size, text["prompt"], text["seed"]) == ((64, 64), "a red car", "8")
    else:
        assert (tmp_path / "cats/tries/1/1/01.txt").read_text().strip()


@pytest.mark.slow
def test_a_negative_prompt_counts(finished: Callable[[Case], Finished], tmp_path: Path) -> None:
    done = finished(next(case for case in LORA_CASES if case.family == "qwen_image"))
    one = dataclasses.replace(ONE, loras=(f"lora/{lora_file(done).name}",))
    negative = dataclasses.replace(one, negative_prompt="blue")
    assert done.job.context.family.takes_negative
    with_one = drawn(done, tmp_path / "cats", negative)
    assert all(a != b for a, b in zip(with_one, drawn(done, tmp_path / "cats", one), strict=True))
    assert read_png(tmp_path / "cats/tries/1/0/00.png")[1]["negative_prompt"] == "blue"


@pytest.mark.slow
def test_the_queue_draws_the_same(
    finished: Callable[[Case], Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = finished(CASES[0])
    one = dataclasses.replace(ONE, loras=(f"lora/{lora_file(done).name}",), strength=0.8)
    run_folder = tmp_path / "--run of $(cats)"
    shutil.copytree(done.folder, run_folder)
    place = run_folder / "tries/1"
    place.mkdir(parents=True)
    (place / tries.RECORD).write_text(tries.to_json(one))
    for name, value in {
        "PYTHONPATH": ROOT,
        "TRAINER_CACHE_DIR": tmp_path,
        "TRAINER_FACTS": CPU_FACTS,
    }.items():
        monkeypatch.setenv(name, str(value))
    loaded = load_config([run_folder / CONFIG_FILE], output=run_folder, environ={})
    queue = Local(folder=tmp_path / "queue", gpus=tuple)
    queue.submit([try_request(loaded, one, place, read_recorded(CPU_FACTS), (), name="try")])
    queue.start_due()
    (watcher,) = queue.children
    try:
        watcher.wait(PATIENCE_SECONDS)
    finally:
        watcher.terminate()
        watcher.wait()
    assert queue.state("1").state is State.FINISHED, queue.log("1")
    found = [tries.picture(place, column, row).read_bytes() for column in range(2) for row in range(2)]
    assert found == drawn(done, tmp_path / "cats", one)


def test_a_record_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    for name in ("../other/lora.safetensors", "/etc/lora.safetensors", "lora/pickle.bin"):
        (tmp_path / tries.RECORD).write_text(tries.to_json(dataclasses.replace(ONE, loras=(name,))))
        with pytest.raises(DataError, match="no LoRA file inside"):
            tries.read_record(tmp_path)
    labels = '{"prompts": ["a"], "loras": ["a.safetensors"], "labels": ["a", "b"]}'
    for wrong in ("", "[]", labels, '{"prompts": [], "loras": ["a.safetensors"]}', '{"prompts": ["a"]}'):
        (tmp_path / tries.RECORD).write_text(wrong)
        with pytest.raises(DataError):
            tries.read_record(tmp_path)
