"""A run that goes on keeps what `auto` decided at its first start."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.planning.conftest import GIB, machine
from tests.unit.planning.test_resolve import matmuls
from trainer.cli.options import Layers
from trainer.config.reading.load import Loaded
from trainer.config.schema import RunConfig
from trainer.errors import ConfigError, HardwareError, StorageError
from trainer.files import codec
from trainer.planning.kept_decisions import continued, starts_from_checkpoint
from trainer.planning.planning import plan_run

BEGAN = {"dtype": "bf16", "weights": "fp8", "micro_batch_size": 2, "accumulation_steps": 8}
Load = Callable[..., Loaded]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """The shipped configuration, with the run's folder."""

    def loaded(*overrides: str) -> Loaded:
        batch = ("train.train_batch_size=4", "train.gradient_accumulation_steps=4")
        config = Path("train_configs/flux1_dev_lora.yaml")
        return Layers((config,), (*batch, *overrides), None, tmp_path).load()

    return loaded


def begin(folder: Path, plan: Any = BEGAN, name: str = "step-000010") -> None:
    (folder / "checkpoints" / name).mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan))


def test_decisions_of_the_first_start_stay(load: Load, tmp_path: Path) -> None:
    begin(tmp_path)
    found = continued(load())
    assert (found.config.features.weights, found.config.model.dtype) == ("fp8", "bf16")
    train = found.config.train
    assert (train.train_batch_size, train.gradient_accumulation_steps) == (2, 8)
    assert found.sources["features.weights"] == str(tmp_path / "plan.json")
    assert found.config.features.attention == "auto"


@pytest.mark.parametrize(
    ("name", "found"),
    [(".step-000010.old", "fp8"), ("step-000010.tmp", "auto"), ("step-000010.damaged", "auto")],
)
def test_they_stay_where_a_start_will_find_a_checkpoint(
    load: Load, tmp_path: Path, name: str, found: str
) -> None:
    """One that a killed save left aside comes back; what is left of others starts nothing."""
    begin(tmp_path, name=name)
    assert continued(load()).config.features.weights == found
    assert starts_from_checkpoint(load().config) is (found == "fp8")


def test_they_stay_where_the_checkpoint_that_the_run_began_from_is_still_named(
    load: Load, tmp_path: Path
) -> None:
    begin(tmp_path)
    named = load(f"checkpoint.resume_from_checkpoint={tmp_path / 'elsewhere/step-000004'}")
    assert continued(named).config.features.weights == "fp8"


def test_a_run_in_fp16_goes_on(load: Load, tmp_path: Path) -> None:
    """Weights in fp16 follow from the type; as a setting of their own no process would take them."""
    begin(tmp_path, BEGAN | {"dtype": "fp16", "weights": "fp16"})
    found = continued(load()).config
    assert (found.features.weights, found.model.dtype) == ("auto", "fp16")
    assert RunConfig.model_validate(found.model_dump()) == found


@pytest.mark.parametrize("began", ["fp16", "int8"])
def test_the_base_of_a_run_in_fp16_stays_where_less_memory_is_left(
    load: Load, tmp_path: Path, began: str
) -> None:
    begin(tmp_path, BEGAN | {"dtype": "fp16", "weights": began})
    plan = plan_run(continued(load()), machine("h200"), find_model=lambda _: None)
    assert (plan.dtype, plan.weights) == ("fp16", began)
    smaller = load("features.memory_budget=20GiB", "features.block_swap=0", "model.dtype=fp16")
    assert plan_run(smaller, machine("h200"), find_model=lambda _: None).weights == "int8"
    if began == "fp16":
        with pytest.raises(HardwareError, match="the run goes on over weights in fp16"):
            plan_run(continued(smaller), machine("h200"), find_model=lambda _: None)
    else:
        assert plan_run(continued(smaller), machine("h200"), find_model=lambda _: None).weights == "int8"


@pytest.mark.parametrize(("began", "stays"), [("int8", "int8"), ("", "kept"), (None, "kept")])
def test_modulation_beside_fp8_stays_as_it_was(
    load: Load, tmp_path: Path, began: str | None, stays: str
) -> None:
    """Plans of before there was a choice do not name it."""
    begin(tmp_path, BEGAN if began is None else {**BEGAN, "modulation": began})

    def found(*asked: str) -> tuple[str, str]:
        features = continued(load(*asked)).config.features
        return features.weights, features.modulation

    assert found() == found("features.weights=fp8") == ("fp8", stays)
    assert found("features.weights=fp8", "features.modulation=int8") == ("fp8", "int8")
    assert found("features.weights=int8") == ("int8", "auto")


@pytest.mark.parametrize("began", ["bf16", "fp8"])
def test_products_stay_as_they_were(load: Load, tmp_path: Path, began: str) -> None:
    """Verdicts change between two starts, and 4 % of a product with them."""
    begin(tmp_path, {**BEGAN, "compute": began})
    found = continued(load())
    assert (found.config.features.weights, found.config.features.compute) == ("fp8", began)
    assert found.sources["features.compute"] == str(tmp_path / "plan.json")
    facts = matmuls(machine("rtx-4090"), bf16=2.0, fp8=1.0)
    assert plan_run(found, facts, find_model=lambda _: None).compute == began
    if began == "fp8":  # nobody wrote it, and the checkpoint would refuse another
        with pytest.raises(
            HardwareError, match="go on on such a machine, or start afresh in another output_dir"
        ):
            plan_run(found, machine("a100-80gb"), find_model=lambda _: None)
    assert continued(load("features.compute=fp8")).config.features.compute == "fp8"
    assert continued(load("features.weights=int8")).config.features.compute == "auto"


@pytest.mark.parametrize(("size", "steps"), [(4, 1), (2, 2), (1, 4)])
def test_samples_stay_parted_as_they_were(load: Load, tmp_path: Path, size: int, steps: int) -> None:
    """Pictures of six shapes, which a run that begins takes one by one."""
    pictures = Path("tests/data/real_shaped/pictures").resolve()
    asked = (f"data.sets=[{{img_dir: {pictures}}}]", "features.compile=true")
    asked += ("train.gradient_accumulation_steps=1",)

    def parted(loaded: Loaded) -> tuple[int, int]:
        plan = plan_run(loaded, machine("h200"), find_model=lambda _: None)
        return plan.micro_batch_size, plan.accumulation_steps

    assert parted(continued(load(*asked))) == (1, 4)
    begin(tmp_path, {**BEGAN, "micro_batch_size": size, "accumulation_steps": steps})
    assert parted(continued(load(*asked))) == (size, steps)


@pytest.mark.parametrize(
    ("computer", "name", "size", "steps", "available"),
    [
        ("several/h200-x2", "flux1_kontext_full", 4, 2, 400),
        ("dgx-spark", "flux1_dev_lora", 4, 1, 90),
        ("dgx-spark", "flux1_dev_lora", 4, 1, 70),
    ],
)
def test_a_step_is_not_parted_anew_where_less_memory_is_left(
    tmp_path: Path, computer: str, name: str, size: int, steps: int, available: int
) -> None:
    """The checkpoint refuses another size of micro-batches, and the same command would never go on."""
    batch = (f"train.train_batch_size={size}", f"train.gradient_accumulation_steps={steps}")
    asked = Layers((Path(f"train_configs/{name}.yaml"),), batch, None, tmp_path).load()
    facts = machine(computer)
    began = plan_run(asked, facts, find_model=lambda _: None)
    begin(tmp_path, json.loads(codec.to_json(began)))
    memory = dataclasses.replace(facts.memory, available_bytes=available * GIB)
    plan = plan_run(continued(asked), dataclasses.replace(facts, memory=memory), find_model=lambda _: None)
    parted = plan.micro_batch_size, plan.accumulation_steps
    assert parted == (began.micro_batch_size, began.accumulation_steps) == (size, steps)


def test_a_checkpoint_that_is_named_is_where_a_run_starts(load: Load, tmp_path: Path) -> None:
    assert not starts_from_checkpoint(load().config)
    assert starts_from_checkpoint(
        load(f"checkpoint.resume_from_checkpoint={tmp_path / 'step-000004'}").config
    )
    begin(tmp_path)
    assert starts_from_checkpoint(load().config)
    assert not starts_from_checkpoint(load("checkpoint.resume_from_checkpoint=never").config)


def test_what_is_written_is_not_touched(load: Load, tmp_path: Path) -> None:
    begin(tmp_path)
    found = continued(load("features.weights=int8", "train.train_batch_size=8"))
    assert found.config.features.weights == "int8"
    # another number of samples a step is another run, which its checkpoint will say
    assert found.config.train.train_batch_size == 8


@pytest.mark.parametrize("missing", ["plan.json", "checkpoints/step-000010"])
def test_a_run_that_begins_decides_itself(load: Load, tmp_path: Path, missing: str) -> None:
    begin(tmp_path)
    path = tmp_path / missing
    path.unlink() if path.is_file() else path.rmdir()
    assert continued(load()) == load()


def test_a_run_that_must_not_go_on_decides_itself(load: Load, tmp_path: Path) -> None:
    begin(tmp_path)
    never = "checkpoint.resume_from_checkpoint=never"
    assert continued(load(never)) == load(never)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_damaged_plan_is_told(load: Load, tmp_path: Path, content: str) -> None:
    begin(tmp_path)
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ConfigError, match="plan cannot be read") as raised:
        continued(load())
    assert str(tmp_path / "plan.json") in str(raised.value)


def test_a_run_keeps_the_optimizer_whose_state_it_has(load: Load, tmp_path: Path) -> None:
    """Free memory changes between two starts: masters are neither found again nor given up."""
    config, image = "train_configs/flux1_dev_full.yaml", ("data.sets=[{img_dir: images}]",)

    def loaded(*overrides: str) -> Loaded:
        return Layers((Path(config),), (*image, "data.resolution=512", *overrides), None, tmp_path).load()

    def optimizer(budget: str) -> str:
        return plan_run(continued(loaded(f"features.memory_budget={budget}")), machine("h200")).optimizer

    assert [optimizer(size) for size in ("130GiB", "100GiB")] == ["adamw_split_bf16", "adamw_stochastic_bf16"]
    plan = {"dtype": "bf16", "weights": "bf16", "micro_batch_size": 1, "accumulation_steps": 8}
    begin(tmp_path, plan | {"optimizer": "adamw_stochastic_bf16"})
    assert optimizer("130GiB") == "adamw_stochastic_bf16"
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"optimizer": "adamw_split_bf16"}))
    with pytest.raises(HardwareError, match="does not fit"):
        optimizer("100GiB")


def test_another_method_is_not_given_the_optimizer_of_the_run_before(load: Load, tmp_path: Path) -> None:
    """Its record refuses it and names the method; `leave train.optimizer out` would be no advice."""
    begin(tmp_path, BEGAN | {"weights": "bf16", "optimizer": "adamw_stochastic_bf16"})
    assert continued(load()).config.train.optimizer == "adamw"
    assert plan_run(continued(load()), machine("h200")).optimizer == "adamw_fused_fp32"


def test_a_folder_that_may_not_be_entered_is_told(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = load()

    def glob(path: Path, pattern: str) -> list[Path]:  # permission bits do not hold root
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "glob", glob)
    with pytest.raises(StorageError, match="Permission denied while reading it"):
        continued(began)
