"""The profile of each machine, and the torch, driver and GPU that go together."""

from __future__ import annotations

import dataclasses

import pytest

from tests.unit.planning.conftest import GIB, machine, with_gpu
from trainer.errors import ConfigError, HardwareError
from trainer.machine.profiles import PROFILES, select, select_each
from trainer.planning.torch_and_driver import check, covering


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("dgx-spark", "dgx-spark"),
        ("rtx-4090", "rtx-4090"),
        ("h200", "hopper-fp8"),
        ("a100-80gb", "generic-cuda"),
        ("too-old-gpu", "generic-cuda"),
        ("cpu", "cpu"),
        ("no-gpu-cuda-torch", "cpu"),
    ],
)
def test_auto(name: str, profile: str) -> None:
    assert select(machine(name))[0].name == profile


def test_auto_goes_by_attributes_not_by_names() -> None:
    spark = machine("dgx-spark")
    assert select(with_gpu(spark, name="something"))[0].name == "dgx-spark"
    assert select(with_gpu(spark, integrated=False))[0].name == "generic-cuda"
    laptop = with_gpu(machine("rtx-4090"), total_memory_bytes=16 * GIB)
    assert select(laptop)[0].name == "generic-cuda"


@pytest.mark.parametrize("requested", ["auto", "generic-cuda", "hopper-fp8"])
@pytest.mark.parametrize("capability", [(9, 0), (11, 0), (12, 1)])
def test_shared_memory_is_guarded_whatever_the_profile_is_called(
    capability: tuple[int, int], requested: str
) -> None:
    """The machine hangs as a whole where its memory is filled: no name may switch that off."""
    gpu = with_gpu(machine("dgx-spark"), capability=capability)
    if requested == "hopper-fp8" and capability != (9, 0):
        return
    found, reason = select(gpu, requested)
    spark = PROFILES["dgx-spark"]
    for name in ("budget_share", "headroom_bytes", "pin_memory", "environment", "notes"):
        assert vars(found)[name] == vars(spark)[name], name
    guarded = found.name != "dgx-spark"
    assert found.memory_source == ("facts" if guarded else "profile dgx-spark")
    assert ("is guarded" in reason) == guarded
    own, _ = select(with_gpu(gpu, integrated=False), requested)
    assert own.headroom_bytes is None and own.pin_memory


@pytest.mark.parametrize(
    ("name", "requested", "says"),
    [
        ("rtx-4090", "dgx-spark", "capability 12.1, this GPU has 8.9"),
        ("dgx-spark", "hopper-fp8", "capability 9.0, this GPU has 12.1"),
        ("h200", "rtx-4090", "use TRAINER_PROFILE=hopper-fp8"),
        ("cpu", "generic-cuda", "no"),
    ],
)
def test_a_profile_that_contradicts_the_machine_is_refused_by_name(
    name: str, requested: str, says: str
) -> None:
    with pytest.raises(HardwareError) as caught:
        select(machine(name), requested)
    assert requested in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("requested", "remedy"),
    [
        ("dgx-sparc", "did you mean `dgx-spark`? known: "),
        ("Hopper FP8", "did you mean `hopper-fp8`? known: "),
        ("h200", "known: "),
    ],
)
def test_an_unknown_profile_is_a_bad_configuration(requested: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select(machine("h200"), requested)
    (problem,) = caught.value.problems
    assert problem.where == "TRAINER_PROFILE" and f'"{requested}"' in problem.what
    assert problem.remedy == remedy + ", ".join(["auto", *PROFILES])


def test_a_requested_profile_takes_the_kind_of_gpu_that_it_is_for() -> None:
    gpus = (*machine("rtx-4090").gpus, *machine("h200").gpus)
    mixed = dataclasses.replace(machine("h200"), gpus=gpus)
    found = [(one.profile.name, one.places, one.facts.gpu.name) for one in select_each(mixed)]
    assert found == [
        ("hopper-fp8", (1,), "NVIDIA H200"),
        ("rtx-4090", (0,), "NVIDIA GeForce RTX 4090"),
    ]
    (asked,) = select_each(mixed, "rtx-4090")
    assert (asked.places, asked.facts.gpus) == ((0,), gpus[:1])
    (cpu,) = select_each(mixed, "cpu")
    assert (cpu.places, cpu.facts) == ((), mixed)
    with pytest.raises(HardwareError, match=r"contradicts this machine \(NVIDIA H200\)"):
        select(mixed, "dgx-spark")


def test_the_cpu_can_be_asked_for_on_a_gpu_host() -> None:
    facts = machine("cpu-torch-on-gpu")
    profile, _ = select(facts, "cpu")
    assert profile is PROFILES["cpu"]
    assert [row.feature for row in check(facts, profile)] == ["torch"]


def test_a_driver_without_visible_gpu_is_no_cpu_machine() -> None:
    facts = dataclasses.replace(machine("h200"), gpus=(), gpu_problem="CUDA_VISIBLE_DEVICES is 'all'")
    with pytest.raises(HardwareError) as caught:
        select(facts)
    assert "CUDA_VISIBLE_DEVICES is 'all'" in str(caught.value)
    assert "TRAINER_PROFILE=cpu" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cpu-torch-on-gpu", ("CPU-only build", "install the CUDA build", "TRAINER_PROFILE=cpu")),
        ("driver-550-cuda-13-torch", ("550.163.01", "CUDA 12.4", "580 or newer", "CUDA 12")),
        ("too-old-gpu", ("GTX 1080", "sm_61", "sm_75")),
    ],
)
def test_what_cannot_run_says_what_helps(name: str, says: tuple[str, ...]) -> None:
    facts = machine(name)
    with pytest.raises(HardwareError) as caught:
        check(facts, select(facts)[0])
    assert caught.value.exit_code == 69
    for part in says:
        assert part in str(caught.value)


def test_an_old_driver_and_an_old_gpu_are_reported_together() -> None:
    facts = dataclasses.replace(machine("too-old-gpu"), driver=(550, 1), driver_cuda=(12, 4))
    with pytest.raises(HardwareError) as caught:
        check(facts, select(facts)[0])
    assert len(caught.value.problems) == 2


def test_driver_550_runs_a_cuda_12_torch_and_says_why() -> None:
    facts = machine("driver-550-cuda-12-torch")
    driver, torch = check(facts, select(facts)[0])
    assert "minor version compatibility" in driver.reason
    assert torch.reason == "carries code for sm_80"


def test_a_forward_compatible_libcuda_counts_not_the_kernel_module() -> None:
    facts = dataclasses.replace(machine("driver-550-cuda-13-torch"), driver_cuda=(13, 0))
    assert check(facts, select(facts)[0])


WHEEL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


@pytest.mark.parametrize(
    ("capability", "ptx", "entry"),
    [
        ((12, 1), True, "sm_120"),
        ((8, 9), True, "sm_86"),
        ((8, 0), True, "sm_80"),
        ((7, 0), True, None),
        ((6, 1), True, None),
        ((11, 0), True, None),
        ((13, 0), True, "compute_120"),
        ((13, 0), False, None),
        ((10, 3), False, "sm_100"),
    ],
)
def test_what_a_wheel_covers(capability: tuple[int, int], ptx: bool, entry: str | None) -> None:
    assert covering(WHEEL, capability, compile_ptx=ptx) == entry


def test_architecture_specific_code_runs_on_that_gpu_only() -> None:
    assert covering(("sm_90a",), (9, 0), compile_ptx=True) == "sm_90a"
    assert covering(("sm_100a",), (10, 3), compile_ptx=True) is None
    assert covering(("sm_100f",), (10, 3), compile_ptx=True) == "sm_100f"
    assert covering(("compute_90a",), (10, 0), compile_ptx=True) is None
