"""LoRA files of checkpoints: those of their steps to the bit, kept and removed with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.runs import LORA_CASES, Case, Workshop, draws, fewer, numbers, steps_saved
from trainer.modeling.adapter import comfyui
from trainer.telemetry.runs import read_run

SHORT = (
    "checkpoint.lora_files=true", "checkpoint.checkpointing_steps=2", "validation.held_out=0",
    "validation.prompts=[]", "train.lr_scheduler=constant",
)  # fmt: skip


def tensors(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Content of the folder's files, the twin for ComfyUI last."""
    paths = sorted(folder.glob("*.safetensors"), key=lambda path: len(path.suffixes))
    return [load_file(path) for path in paths]


def equal(left: list[dict[str, torch.Tensor]], right: list[dict[str, torch.Tensor]]) -> bool:
    assert left and [one.keys() for one in left] == [one.keys() for one in right]
    return all(
        torch.equal(value, theirs[name])
        for ours, theirs in zip(left, right, strict=True)
        for name, value in ours.items()
    )


@pytest.mark.parametrize(
    ("case", "ema"),
    [
        *(pytest.param(*one.values, "null", marks=one.marks) for one in fewer(LORA_CASES)),
        (LORA_CASES[0], "0.9"),
    ],
    ids=str,
)
def test_each_is_the_result_of_a_run_that_ends_there(
    case: Case, ema: str, workshop: Workshop, tmp_path: Path
) -> None:
    mean = f"train.ema_decay={ema}"
    long = workshop.job(case, tmp_path / "long", *SHORT, mean, "train.max_train_steps=5")
    long.train()
    assert steps_saved(long.folder) == ["step-000004", "step-000005"]
    short = workshop.job(case, tmp_path / "short", *SHORT[1:], mean, "train.max_train_steps=4")
    short.train()
    assert not list(short.folder.glob("checkpoints/*/lora"))
    at = {step: long.folder / f"checkpoints/step-{step:06d}/lora" for step in (4, 5)}
    assert equal(tensors(at[4]), tensors(short.folder / "lora"))
    assert equal(tensors(at[5]), tensors(long.folder / "lora"))
    assert not equal(tensors(at[4]), tensors(at[5]))
    listed = [[file.path.name for file in one.lora] for one in read_run(long.folder).checkpoints]
    if draws(case.family):  # names that a folder of many LoRAs can hold
        assert listed[0][-1] == "run-step-000004.safetensors"
    assert [len(names) for names in listed] == [len(tensors(at[4]))] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", "lokr"])
def test_so_it_is_for_other_kinds_of_adapters(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    kinds = (f"lora.type={kind}", "train.max_train_steps=2")
    job = workshop.job(LORA_CASES[0], tmp_path, *SHORT, *kinds)
    job.train()
    assert not [line for line in job.said if line.startswith("no LoRA file")]
    assert equal(tensors(job.folder / "checkpoints/step-000002/lora"), tensors(job.folder / "lora"))


@pytest.mark.slow
def test_a_run_goes_on_whatever_becomes_of_them(workshop: Workshop, tmp_path: Path) -> None:
    """Removed by hand, they are missed by nobody; a resume without them gives the same numbers."""
    job = workshop.job(LORA_CASES[0], tmp_path / "run", *SHORT, "train.max_train_steps=2")
    job.train()
    (folder,) = job.folder.glob("checkpoints/*/lora")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    again = workshop.job(
        LORA_CASES[0], tmp_path / "run", *SHORT[1:], "train.max_train_steps=4", "train.lr_warmup_steps=0"
    )
    again.train()
    assert "resumed from step-000002" in again.said
    straight = workshop.job(LORA_CASES[0], tmp_path / "straight", *SHORT[1:], "train.max_train_steps=4")
    straight.train()
    assert numbers(again.folder)[-1] == numbers(straight.folder)[-1]
    assert not list(again.folder.glob("checkpoints/step-000004/lora"))


def test_one_that_reads_back_otherwise_is_left_out_and_told(
    workshop: Workshop, tmp_path: Path, flipped_bit: list[Path]
) -> None:
    job = workshop.job(LORA_CASES[0], tmp_path, *SHORT, "train.max_train_steps=4")
    job.train()
    told = [line for line in job.said if line.startswith("no LoRA file")]
    assert told == ["no LoRA file of step 2: 1 tensor read back from disk differs from the trained ones"]
    assert [bool(one.lora) for one in read_run(job.folder).checkpoints] == [False, True]


def test_a_twin_that_reads_back_otherwise_takes_both_with_it(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = comfyui.write_tensors, list[Path]()

    def damaged(path: Path, *given: Any) -> str:
        digest = real(path, *given)
        calls.append(path)
        if len(calls) == 1:  # the disk keeps another last bit
            whole = bytearray(path.read_bytes())
            whole[-1] ^= 1
            path.write_bytes(whole)
        return digest

    monkeypatch.setattr(comfyui, "write_tensors", damaged)
    job = workshop.job(LORA_CASES[0], tmp_path, *SHORT, "train.max_train_steps=4")
    job.train()
    told = [line for line in job.said if line.startswith("no LoRA file")]
    assert told == ["no LoRA file of step 2: the file read back from disk is not what was written"]
    assert [bool(one.lora) for one in read_run(job.folder).checkpoints] == [False, True]
