"""The plans of all recorded machines, word for word, and what must be true of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.golden import plans
from trainer import families
from trainer.cli import main
from trainer.errors import HardwareError
from trainer.machine.reading import read_recorded
from trainer.planning.plan import Plan
from trainer.planning.planning import plan_run
from trainer.planning.render import plan_text


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Plan]:
    """plan(machine, config) for a shipped configuration whose base model is not on this disk."""
    monkeypatch.chdir(plans.ROOT)

    def plan(machine: str, config: str) -> Plan:
        facts = read_recorded(plans.MACHINES / f"{machine}.json")
        loaded = plans.load_shipped(Path("train_configs") / f"{config}.yaml")
        return plan_run(loaded, facts, find_model=lambda _: None)

    return plan


def test_ten_machines_are_recorded() -> None:
    assert len(plans.machines()) == 10
    assert plans.machines() == sorted(path.stem for path in plans.PLANS.glob("*.txt"))


@pytest.mark.parametrize("machine", plans.machines())
def test_plan_is_the_committed_one(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plans.ROOT)
    expected = (plans.PLANS / f"{machine}.txt").read_text()
    assert plans.machine_text(machine) == expected, "run `make golden` and read the diff"


@pytest.mark.parametrize("machine", [*plans.machines(), *plans.machines_of_several()])
def test_recorded_facts_identify_nobody(machine: str) -> None:
    text = (plans.MACHINES / f"{machine}.json").read_text().lower()
    assert not [word for word in ("uuid", "serial", "hostname", "/home", "/work") if word in text]


def test_spark_keeps_its_host_alive(planned: Callable[[str, str], Plan]) -> None:
    plan = planned("dgx-spark", "flux1_dev_lora")
    assert plan.environment == {
        "PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.75",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert not plan.pin_memory
    # within the budget: what would be recomputed below it costs time and makes nothing safer
    assert not plan.activation_checkpointing and plan.peak_bytes < 0.97 * plan.budget_bytes
    rows = {row.feature: row.value for row in plan.decisions}
    assert (rows["offload"], rows["cache_in_memory"], plan.keep_bytes) == ("off", "off", 0)
    assert plan.attention == "flash"


def test_flux_fits_a_4090_with_one_copy_of_an_fp8_base(planned: Callable[[str, str], Plan]) -> None:
    plan = planned("rtx-4090", "flux1_dev_lora")
    assert (plan.weights, plan.compute, plan.weight_copies, plan.dtype) == ("fp8", "fp8", 1, "bf16")
    assert (plan.compile, plan.activation_budget) == (True, 1.0)
    assert plan.activation_checkpointing and 0 < plan.recomputed_blocks < 57
    assert plan.peak_bytes < plan.budget_bytes < 25_757_220_864


def test_tables_of_the_four_machines_differ(planned: Callable[[str, str], Plan]) -> None:
    four = ("dgx-spark", "rtx-4090", "a100-80gb", "h200")
    assert len({planned(machine, "flux1_dev_lora").decisions for machine in four}) == 4


def test_full_fine_tune_is_refused_on_a_4090_with_figures(planned: Callable[[str, str], Plan]) -> None:
    with pytest.raises(HardwareError) as caught:
        planned("rtx-4090", "flux1_dev_full")
    assert "needs 93.9 GiB at least" in str(caught.value)
    assert "budget is 22.1 GiB (95% of 24.0 GiB; 3% is left" in str(caught.value)
    assert "fits with method: lora" in str(caught.value)


@pytest.mark.parametrize("family", families.names())
def test_what_fits_no_recorded_machine_says_so_itself(
    family: str, planned: Callable[[str, str], Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    fitting = 0
    for machine in plans.machines():
        with contextlib.suppress(HardwareError):
            planned(machine, f"{family}_full")
            fitting += 1
    assert main(["families"]) == 0
    told = re.search(rf"^{family}: (.*\n  .*)*", capsys.readouterr().out, re.MULTILINE)
    head = (plans.ROOT / "train_configs" / f"{family}_full.yaml").read_text().partition("\nfamily:")[0]
    assert told is not None
    assert ("no recorded machine" in told[0]) == (not fitting)
    assert ("none of the machines that are recorded" in " ".join(head.split("\n# "))) == (not fitting)


def test_full_fine_tune_fits_an_h200(planned: Callable[[str, str], Plan]) -> None:
    plan = planned("h200", "flux1_dev_full")
    assert plan.optimizer == "adamw_split_bf16"
    assert (plan.compile, plan.weights, plan.compute) == (True, "bf16", "bf16")
    assert plan.activation_checkpointing and 0 < plan.recomputed_blocks < 57


def test_the_h200_multiplies_in_fp8_where_that_was_measured_faster(
    planned: Callable[[str, str], Plan],
) -> None:
    plan = planned("h200", "flux1_dev_lora")
    assert (plan.weights, plan.compute, plan.weight_copies, plan.compile) == ("fp8", "fp8", 2, True)
    assert planned("h200", "flux2_dev_lora").compute == "bf16"  # its layers are of another shape


@pytest.mark.parametrize("machine", plans.machines_of_several())
def test_plan_of_several_gpus_is_the_committed_one(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plans.ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # has no part in it
    expected = (plans.PLANS / f"{machine}.txt").read_text()
    assert f"{plan_text(plans.shared_plan(machine))}\n" == expected, "run `make golden` and read the diff"


def test_each_machine_of_several_gpus_has_its_plan() -> None:
    assert plans.machines_of_several() == sorted(
        f"{plans.SEVERAL}/{path.stem}" for path in (plans.PLANS / plans.SEVERAL).glob("*.txt")
    )


@pytest.mark.parametrize(
    ("machine", "devices"),
    [
        ("h200-x2", (0, 1)),
        ("h200-x8", (0, 1, 2, 3)),
        ("h100-x2", (0, 1)),
        ("rtx-4090-x2", (0, 1)),
        ("rtx-3060-and-4090", (1,)),
    ],
)
def test_four_images_a_step_are_shared_by_gpus_of_one_kind(
    machine: str, devices: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plans.ROOT)
    plan = plans.shared_plan(f"{plans.SEVERAL}/{machine}")
    assert (plan.devices, plan.ranks) == (devices, len(devices))
    assert (plan.micro_batch_size, plan.accumulation_steps) == (1, 4), "the effective batch is the run's"
    assert plan.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert ("NCCL_SOCKET_IFNAME" in plan.rank_environment) == (plan.ranks > 1)
    rows = {row.value for row in plan.decisions if row.feature == "environment"}
    assert rows == {*plan.environment, *plan.rank_environment}
    process = next(part for part in plan.host_memory if part.name == "process")
    assert process.bytes == plan.ranks * 3.5 * 2**30
