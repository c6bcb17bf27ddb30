"""The description of a machine for people: no bytes, no brackets, the three CUDAs apart."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.unit.container.test_preflight import MOUNTINFO
from tests.unit.planning.conftest import MACHINES, machine
from trainer.container.describe import machine_rows, text, volume_rows
from trainer.machine.facts import Facts
from trainer.machine.mounts import parse_mounts


def rows(facts: Facts, requested: str = "auto", toolkit: str = "none") -> dict[str, str]:
    return dict(machine_rows(facts, requested, toolkit))


def test_driver_runtime_and_toolkit_are_told_apart() -> None:
    found = rows(machine("driver-550-cuda-13-torch"), toolkit="CUDA 12.8 in /usr/local/cuda")
    assert found["driver"] == "550.163.01, runs CUDA 12.4 and older"
    assert found["runtime"].startswith("CUDA 13.0: torch 2.13.0 brings it, built for sm_75, ")
    assert found["toolkit"] == "CUDA 12.8 in /usr/local/cuda"
    assert found["profile"].startswith("generic-cuda: NVIDIA A100-SXM4-80GB: compute capability 8.0, ")


def test_what_is_missing_is_told_too() -> None:
    bare = rows(machine("cpu"), "rtx-4090")
    assert (bare["GPU"], bare["driver"]) == ("none", "none visible")
    assert bare["runtime"] == "none: torch 2.13.0 is a CPU build"
    assert bare["profile"] == "TRAINER_PROFILE=rtx-4090 does not fit, see below"
    hidden = dataclasses.replace(machine("h200"), gpus=(), driver_cuda=None, torch=None)
    assert rows(hidden)["driver"] == "580.159.04, without libcuda here"
    assert rows(hidden)["runtime"] == "none: torch is not installed"


@pytest.mark.parametrize(
    ("name", "can", "lacks"),
    [
        ("h200", "train in bf16 and fp16; multiply a frozen base in FP8; store a frozen base in int8", ""),
        ("a100-80gb", "train in bf16 and fp16; store a frozen base in", "products in FP8"),
        ("too-old-gpu", "train in fp32 and fp16; ", "bf16 (needs compute capability 8.0); products in FP8"),
        ("cpu", "train in fp32 and bf16 on the CPU", ""),
    ],
)
def test_what_it_can_do(name: str, can: str, lacks: str) -> None:
    found = rows(machine(name))
    assert found["can"].startswith(can)
    assert found.get("lacks", "").startswith(lacks)


def test_what_a_package_or_a_compiler_would_add() -> None:
    found = rows(dataclasses.replace(machine("h200"), packages={}, c_compiler=False))
    assert found["can"] == "train in bf16 and fp16; multiply a frozen base in FP8"
    *packages, compiler = found["lacks"].split("; ")
    assert {"int8 (optimum-quanto is not installed)", "nf4 (bitsandbytes is not installed)"} <= {*packages}
    assert all(line.endswith(" is not installed)") for line in packages)
    assert compiler == "compiled blocks (no C compiler)"


def test_what_was_measured() -> None:
    assert rows(machine("h200"))["measured"] == "7 kernels, 7 of them work: see the table"
    assert rows(machine("rtx-4090"))["measured"].startswith("nothing yet; `trainer train` does it once")
    assert "measured" not in rows(machine("cpu"))


def test_memory_of_its_own_and_shared() -> None:
    assert rows(machine("dgx-spark"))["GPU"].endswith(" GiB shared with the CPU")
    assert rows(machine("h200"))["GPU"].endswith(" GiB of its own")
    memory = dataclasses.replace(machine("cpu").memory, cgroup_limit_bytes=8 * 1024**3)
    limited = rows(dataclasses.replace(machine("cpu"), memory=memory))
    assert limited["machine"].endswith("host memory available, this container's limit is 8.0 GiB")


def test_volumes_are_mounted_or_not() -> None:
    lines = text(volume_rows(parse_mounts(MOUNTINFO)))
    assert lines[0] == "/data     mounted, read-only: images with captions, or conversations"
    assert lines[1] == "/config   not mounted: your configuration files"
    assert lines[4].startswith("/output   mounted: ")


@pytest.mark.parametrize("name", sorted(path.stem for path in MACHINES.glob("*.json")))
def test_every_line_is_for_people(name: str) -> None:
    lines = text(machine_rows(machine(name), "auto", "none"))
    assert not [line for line in lines if re.search(r"[{}\[\]]|\d{7}", line)]
