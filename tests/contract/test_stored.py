"""A base that is stored in nf4 already trains as it is."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.contract.runs import FULL_CASES, LORA_CASES, Case, Workshop, mostly_slow
from tests.stored_nf4 import stored_state
from trainer.engine.building.build import load_base
from trainer.errors import HardwareError

QUIET = ("validation.prompts=[]", "validation.held_out=0", "train.max_train_steps=3")
STORED = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def stored(case: Case, workshop: Workshop, folder: Path) -> Workshop:
    """The workshop with a copy of the base whose trained component is packed, as its library writes it."""
    job = workshop.job(Case(family=case.family, method="lora"), folder / "plain", "features.weights=nf4")
    base = shutil.copytree(job.context.source.folder, folder / "base")
    component = base / job.context.family.trained_component
    state = stored_state(load_base(job.context).module, job.context.dtype)
    (single,) = component.glob("*.safetensors")
    save_file(state, single, {"format": "pt"})
    config = json.loads((component / "config.json").read_text())
    (component / "config.json").write_text(json.dumps(config | {"quantization_config": STORED}))
    return dataclasses.replace(workshop, base=lambda family: base)


@pytest.mark.parametrize("case", mostly_slow(LORA_CASES), ids=str)
def test_a_base_in_nf4_trains_and_its_lora_is_proved(case: Case, workshop: Workshop, tmp_path: Path) -> None:
    job = stored(case, workshop, tmp_path).job(case, tmp_path / "run", *QUIET)
    assert job.context.plan.weights == "nf4"
    assert any("stored" in row.reason for row in job.context.plan.decisions if row.feature == "weights")
    job.train()
    assert "Proved: " in "\n".join(job.said)
    fresh = workshop.job(case, tmp_path / "fresh", "features.weights=nf4")
    ours, theirs = (load_base(one.context).module.state_dict() for one in (job, fresh))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("case", FULL_CASES[:1], ids=str)
def test_a_base_in_nf4_cannot_be_trained_in_full(case: Case, workshop: Workshop, tmp_path: Path) -> None:
    packed = stored(case, workshop, tmp_path)
    with pytest.raises(HardwareError, match="nf4"):
        packed.job(case, tmp_path / "run", *QUIET)
