"""Advice to a run that goes on and has too little memory: nothing that its checkpoint refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.unit.planning.conftest import GIB, machine
from tests.unit.planning.test_out_of_memory import CUDA
from trainer.cli.options import Layers
from trainer.config.reading.load import Loaded
from trainer.engine.records import fingerprint
from trainer.errors import HardwareError
from trainer.files import codec
from trainer.machine.facts import Facts
from trainer.planning.choose.suggestions import ALLOWED_ON_RESUME, START_AFRESH
from trainer.planning.kept_decisions import continued
from trainer.planning.out_of_memory import out_of_memory
from trainer.planning.plan import Plan
from trainer.planning.planning import plan_run
from trainer.telemetry.status import Phase


def asked(folder: Path, *overrides: str) -> Loaded:
    """FLUX.2's LoRA in this folder."""
    return Layers((Path("train_configs/flux2_dev_lora.yaml"),), overrides, None, folder).load()


def began(folder: Path, *overrides: str) -> tuple[Loaded, Plan]:
    """FLUX.2's LoRA that a DGX Spark has begun to train, and its plan."""
    found = asked(folder, *overrides)
    plan = plan_run(found, machine("dgx-spark"), find_model=lambda _: None)
    (folder / "checkpoints/step-000010").mkdir(parents=True)
    (folder / "plan.json").write_text(codec.to_json(plan))
    return found, plan


def with_memory(size: int) -> Facts:
    """A smaller DGX Spark of so many GiB, all of them free."""
    facts = machine("dgx-spark")
    memory = dataclasses.replace(facts.memory, total_bytes=size * GIB, available_bytes=size * GIB)
    return dataclasses.replace(facts, memory=memory)


def advice(of: Loaded, plan: Plan) -> str:
    """The remedy where memory runs out in training."""
    return out_of_memory(CUDA, Phase.TRAIN, of.config, plan, lambda _: True).problems[0].remedy


def test_of_a_plan_that_does_not_fit(tmp_path: Path) -> None:
    run, _ = began(tmp_path)
    with pytest.raises(HardwareError) as caught:
        plan_run(continued(run), with_memory(85), find_model=lambda _: None)
    text = str(caught.value)
    assert START_AFRESH in text and "fits with" not in text and "use a machine" not in text


def test_what_a_checkpoint_lets_go_is_still_proposed(tmp_path: Path) -> None:
    began(tmp_path)
    kept = "features.activation_checkpointing=false"
    with pytest.raises(HardwareError) as caught:
        plan_run(continued(asked(tmp_path, kept)), with_memory(105), find_model=lambda _: None)
    remedy = caught.value.problems[0].remedy
    assert remedy.startswith("fits with features.activation_checkpointing: true (") and "fp8" not in remedy


def test_where_memory_runs_out_after_a_checkpoint(tmp_path: Path) -> None:
    run, plan = began(tmp_path, "train.train_batch_size=2")
    plan = dataclasses.replace(plan, cuda_graphs=True)
    text = advice(run, plan)
    assert text.startswith("use features.cuda_graphs: false, or ") and START_AFRESH in text
    refused = ("features.weights", "lora.type", "train.train_batch_size", "data.resolution")
    assert not [key for key in refused if key in text]
    afresh = advice(asked(tmp_path, "checkpoint.resume_from_checkpoint=never"), plan)
    assert "features.weights" in afresh and "data.resolution" in afresh and START_AFRESH not in afresh
    assert advice(run, dataclasses.replace(plan, device="cpu")) == f"{START_AFRESH}; what was saved stays"


def test_checkpoints_let_go_what_is_proposed() -> None:
    told = {key for keys in fingerprint.TOLD.values() for key in keys}
    refused = {key for keys in fingerprint.REFUSED.values() for key in keys}
    assert {*fingerprint.FREE, *told} >= ALLOWED_ON_RESUME and not ALLOWED_ON_RESUME & refused
