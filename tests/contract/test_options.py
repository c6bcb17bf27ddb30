"""Every optimizer, schedule, precision and kind of adapter: a resume changes nothing, the file is proved."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.contract import runs
from tests.contract.loaders import lora_file
from tests.contract.runs import (
    CPU_FACTS,
    SHORT_CHECKPOINT,
    Case,
    Job,
    Workshop,
    copy_until,
    different,
    files,
    losing,
    numbers,
)
from tests.unit.telemetry.test_tracker import Fake
from trainer.engine.records import checkpoint
from trainer.engine.training import held_out, loop
from trainer.errors import DivergedError, ExitCode

SMALLEST = Case(family="flux1_dev", method="lora")
SLOW = pytest.mark.slow
QUICK = ("validation.prompts=[]", "validation.held_out=1", "validation.every_steps=4")
KEPT = ("lora/*", "best/*", "checkpoints/*/*")


@dataclass(frozen=True, kw_only=True)
class Option:
    """Overrides that one option adds to the small run."""

    name: str
    overrides: tuple[str, ...]
    case: Case = SMALLEST
    is_slow: bool = False


OPTIONS = (
    Option(name="adamw_8bit", overrides=("train.optimizer=adamw_8bit", "lora.rank=128")),
    Option(name="prodigy", overrides=("train.optimizer=prodigy", "train.learning_rate=1"), is_slow=True),
    Option(
        name="prodigy-bf16",
        overrides=("train.optimizer=prodigy", "train.learning_rate=1", "model.dtype=bf16"),
        is_slow=True,
    ),
    Option(
        name="adamw_8bit-bf16", overrides=("train.optimizer=adamw_8bit", "model.dtype=bf16"), is_slow=True
    ),
    Option(name="linear", overrides=("train.lr_scheduler=linear", "train.lr_warmup_steps=2"), is_slow=True),
    Option(
        name="polynomial",
        overrides=("train.lr_scheduler=polynomial", "train.lr_power=2"),
        is_slow=True,
    ),
    Option(
        name="restarts",
        overrides=("train.lr_scheduler=cosine_with_restarts", "train.lr_num_cycles=2"),
        is_slow=True,
    ),
    Option(name="cosine", overrides=("train.lr_scheduler=cosine",), is_slow=True),
    Option(name="bf16", overrides=("model.dtype=bf16",), is_slow=True),
    Option(name="fp16-ema", overrides=("model.dtype=fp16", "train.ema_decay=0.9")),
    Option(name="ema", overrides=("train.ema_decay=0.9",), is_slow=True),
    Option(name="dropout", overrides=("lora.dropout=0.3", "features.activation_checkpointing=true")),
    Option(
        name="patterns",
        overrides=("lora.rank_pattern={to_q: 2, to_out.0: 6}", "lora.alpha_pattern={to_k: 3}"),
    ),
    Option(name="dora", overrides=("lora.type=dora",)),
    Option(name="dora-bf16", overrides=("lora.type=dora", "model.dtype=bf16"), is_slow=True),
    Option(name="lokr", overrides=("lora.type=lokr", "lora.alpha_pattern={to_k: 3}")),
    Option(name="lokr-bf16", overrides=("lora.type=lokr", "model.dtype=bf16"), is_slow=True),
    Option(
        name="full-ema",
        overrides=("train.ema_decay=0.9",),
        case=Case(family="flux1_dev", method="full"),
        is_slow=True,
    ),
    Option(
        name="full-prodigy",
        overrides=("train.optimizer=prodigy", "train.learning_rate=1"),
        case=Case(family="flux1_dev", method="full"),
        is_slow=True,
    ),
)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The recorded machine with the packages of all extras."""
    facts = json.loads(CPU_FACTS.read_text())
    facts["packages"] |= {"prodigyopt": "1.1.2", "wandb": "0.31.0"}
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(facts))
    monkeypatch.setattr(runs, "CPU_FACTS", path)


def parameters(options: Sequence[Option]) -> list[object]:
    return [pytest.param(one, id=one.name, marks=[SLOW] if one.is_slow else []) for one in options]


def straight(option: Option, workshop: Workshop, folder: Path, *more: str) -> Job:
    job = workshop.job(option.case, folder, *QUICK, *option.overrides, *more)
    job.train()
    return job


@pytest.mark.parametrize("option", parameters(OPTIONS))
def test_three_steps_and_a_resume_equal_six(option: Option, workshop: Workshop, tmp_path: Path) -> None:
    whole = straight(option, workshop, tmp_path / "whole")
    copy_until(whole, SHORT_CHECKPOINT, tmp_path / "parts")
    parts = straight(option, workshop, tmp_path / "parts")
    assert f"resumed from step-{SHORT_CHECKPOINT:06d}" in parts.said
    assert numbers(parts.folder) == numbers(whole.folder)
    assert not different(files(parts.folder, *KEPT), files(whole.folder, *KEPT))
    assert any("Proved: " in line for line in parts.said)
    assert all(torch.isfinite(torch.tensor(row["loss"])) for row in numbers(whole.folder)[1:])
    if option.case.method == "lora":
        assert held_out.read_best(whole.folder) is not None


def test_a_mean_of_the_weights_is_what_is_saved_and_the_weights_are_what_goes_on(
    workshop: Workshop, tmp_path: Path
) -> None:
    """The file holds the mean, which a run without one would not have; the checkpoint holds both.

    The last loss alone is measured on held-out samples: what is kept of it is the mean too.
    """
    off = ("validation.prompts=[]", "train.max_train_steps=6")
    off += ("validation.held_out=1", "validation.every_steps=6", "checkpoint.lora_files=true")
    with_mean = workshop.job(SMALLEST, tmp_path / "mean", *off, "train.ema_decay=0.5")
    with_mean.train()
    plain = workshop.job(SMALLEST, tmp_path / "plain", *off)
    plain.train()
    last = "checkpoints/step-000006"
    masters, raw = (checkpoint.read_group(job.folder / last, "weights", "cpu") for job in (with_mean, plain))
    assert all(torch.equal(masters[name], raw[name]) for name in raw)
    state = checkpoint.read_group(with_mean.folder / last, "optimizer", "cpu")
    saved, other = (load_file(lora_file(job)) for job in (with_mean, plain))
    for name, value in saved.items():
        inside = name.removeprefix("transformer.").replace(".weight", ".default.weight")
        assert torch.equal(value, state[f"{inside}/ema"])
        assert torch.equal(other[name], raw[inside])
    assert any(not torch.equal(saved[name], other[name]) for name in saved)
    for folder in ("best", f"{last}/lora"):
        paths = with_mean.folder.glob(f"{folder}/*.safetensors")
        (kept,) = (path for path in paths if ".comfyui" not in path.name)
        found = load_file(kept)
        assert found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)


def test_the_best_is_the_lowest_held_out_loss_also_where_later_ones_are_higher(
    workshop: Workshop, tmp_path: Path
) -> None:
    """A rate that ruins the LoRA in the end: the file in best/ is an earlier one."""
    job = workshop.job(
        SMALLEST,
        tmp_path,
        "validation.prompts=[]",
        "validation.every_steps=1",
        "train.learning_rate=0.1",
        "train.max_train_steps=2",
    )
    job.train()
    rows = [row for row in numbers(job.folder) if "validation_loss" in row and row["step"]]
    lowest = min(rows, key=lambda row: row["validation_loss"])
    kept = held_out.read_best(job.folder)
    assert kept is not None
    assert (kept["step"], kept["validation_loss"]) == (lowest["step"], lowest["validation_loss"])
    assert kept["step"] == 1
    assert any(line.startswith(f"best: step {kept['step']}, held-out loss") for line in job.said)
    (file,) = (path for path in job.folder.glob("best/*.safetensors") if ".comfyui." not in path.name)
    final = load_file(lora_file(job))
    assert any(not torch.equal(value, final[name]) for name, value in load_file(file).items())


def test_dropout_repeats_also_where_blocks_are_recomputed(workshop: Workshop, tmp_path: Path) -> None:
    """Two runs are equal, and without dropout the loss is another one."""
    off = ("validation.prompts=[]", "validation.held_out=0", "train.max_train_steps=2")
    losses: list[list[float]] = []
    for name, more in (
        ("a", ("lora.dropout=0.5",)),
        ("b", ("lora.dropout=0.5",)),
        ("recomputed", ("lora.dropout=0.5", "features.activation_checkpointing=true")),
        ("without", ()),
    ):
        job = workshop.job(SMALLEST, tmp_path / name, *off, *more)
        job.train()
        losses.append([row[name] for row in numbers(job.folder) for name in ("loss", "grad_norm")])
    assert losses[0] == losses[1]
    # what is recomputed drops the same values: the gradients are the same
    assert losses[0] == pytest.approx(losses[2], rel=1e-6)
    assert losses[0] != losses[3]


def test_without_dropped_captions_no_empty_one_is_encoded(workshop: Workshop, tmp_path: Path) -> None:
    """Of an editing family that would be one a sample, as long to encode as its caption."""
    found = []
    for rate in (0, 1e-9):
        edits = Case(family="qwen_image_edit", method="lora")
        cache, drops = tmp_path / f"cache-{rate}", f"data.caption_dropout_rate={rate}"
        job = workshop.job(edits, tmp_path / f"{rate}", *QUICK, drops, cache=cache)
        job.train()
        found.append((numbers(job.folder), len(list(cache.rglob("text/*/*.safetensors")))))
    (losses, without), (same, beside) = found
    assert losses == same
    assert (without, beside) == (len(job.samples.all), 2 * len(job.samples.all))


@SLOW
def test_every_micro_batch_drops_other_values(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One mask for all of them would leave half of the adapter's inputs unused for ever."""
    masks: list[torch.Tensor] = []
    compute, dropout = loop.compute, torch.nn.functional.dropout

    def computed(*given: Any) -> torch.Tensor:
        masks.append(torch.zeros(0))
        return compute(*given)

    def dropped(values: torch.Tensor, p: float, training: bool, inplace: bool) -> torch.Tensor:
        """`dropout`, which keeps the mask of the first values of each micro-batch."""
        found = dropout(values, p, training, inplace)
        if training and p and not masks[-1].numel():
            masks[-1] = found.detach().reshape(-1)[:64] != 0
        return found

    monkeypatch.setattr(loop, "compute", computed)
    monkeypatch.setattr(torch.nn.functional, "dropout", dropped)
    # also after a held-out loss and previews, which themselves drop nothing
    looking = ("validation.every_steps=1", "train.max_train_steps=3", "lora.dropout=0.5")
    seen: list[list[tuple[bool, ...]]] = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        masks.clear()
        workshop.job(SMALLEST, tmp_path / name, *looking, f"train.seed={seed}").train()
        seen.append([tuple(mask.tolist()) for mask in masks])
    assert {len(mask) for run in seen for mask in run} == {64}
    assert seen[0] == seen[1]
    assert len(seen[0]) >= 6 and len({*seen[0], *seen[2]}) == len(seen[0]) + len(seen[2])


def test_fp16_skips_steps_that_overflow_and_ends_where_none_fits(workshop: Workshop, tmp_path: Path) -> None:
    """Losses of some thousands overflow at the first scales, and infinite ones at every scale."""
    off = ("validation.prompts=[]", "validation.held_out=0", "model.dtype=fp16", "train.log_every_steps=1")
    job = workshop.job(SMALLEST, tmp_path / "skips", *off, "train.max_train_steps=6")
    losing(job, factor=1e3).train()
    rows = numbers(job.folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    state = checkpoint.read_group(job.folder / "checkpoints" / "step-000006", "optimizer", "cpu")
    skipped = 6 - int(state["loss/applied"].item())
    assert 0 < skipped < 6
    assert state["loss/scale"].item() == 2.0 ** (16 - skipped)
    never = workshop.job(SMALLEST, tmp_path / "ends", *off, "train.max_train_steps=40")
    with pytest.raises(DivergedError, match="overflow fp16 however small") as caught:
        losing(never, factor=float("inf")).train()
    assert caught.value.exit_code is ExitCode.DIVERGED
    assert "step 17: " in str(caught.value)


def test_a_run_is_told_to_weights_and_biases(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and pictures by step, and the end of it also where the run ends in an error."""
    fake = Fake()
    fake.install(monkeypatch)
    job = workshop.job(
        SMALLEST,
        tmp_path,
        "train.report_to=wandb",
        "train.tracker_project_name=mine",
        "train.max_train_steps=3",
    )
    job.train()
    assert fake.started[0]["project"] == "mine"
    assert fake.started[0]["config"]["report_to"] == "wandb"
    losses = [(step, values["loss"]) for values, step in fake.logged if "loss" in values]
    assert losses == [(row["step"], row["loss"]) for row in numbers(job.folder) if "loss" in row]
    assert {step for values, step in fake.logged if "previews" in values} == {0, 3}
    assert fake.codes == [0]
    with pytest.raises(DivergedError):
        losing(workshop.job(SMALLEST, tmp_path / "ends", "train.report_to=wandb"), factor=math.nan).train()
    assert fake.codes == [0, 1]
