"""Reasons that stop a container: mounts, folders, shared memory, libraries, memory, on recorded machines."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.unit.planning.conftest import GIB, machine, with_gpu
from trainer.container.appliance import MISPLACED, TARGETS, VOLUMES
from trainer.container.preflight import Folder, Surroundings, container_problems, machine_problems, warnings
from trainer.errors import HardwareError
from trainer.machine.facts import Facts
from trainer.machine.mounts import Mount, holding, parse_mounts
from trainer.machine.profiles import PROFILES, select
from trainer.planning.torch_and_driver import require_memory_kind

MOUNTINFO = r"""
600 500 0:50 / / rw,relatime master:1 - overlay overlay rw,lowerdir=/var/lib/docker/l
601 600 0:52 / /proc rw,nosuid - proc proc rw
602 600 0:55 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k
610 600 8:1 /home/me/my\040images /data ro,relatime - ext4 /dev/sda1 rw
611 600 8:1 /home/me/out /output rw,relatime shared:7 master:3 - ext4 /dev/sda1 rw
612 600 8:17 / /models rw,relatime - xfs /dev/sdb1 ro
"""


def mount(path: str, **changes: Any) -> Mount:
    plain = Mount(path=path, root=f"/home/me{path}", kind="ext4", read_only=False)
    return dataclasses.replace(plain, **changes)


ROOT = mount("/", root="/", kind="overlay")


def folder(path: str, **changes: Any) -> Folder:
    plain = Folder(path=path, meaning="the run's folder", existing=path, owner=0, error="Permission denied")
    return dataclasses.replace(plain, **changes)


def around(*mounts: Mount, **changes: Any) -> Surroundings:
    return Surroundings(user="10001:0", mounts=(ROOT, *mounts), **changes)


def told(surroundings: Surroundings, facts: Facts | None = None, requested: str = "auto") -> tuple[str, ...]:
    return tuple(map(str, container_problems(facts, requested, surroundings)))


def available(facts: Facts, size: int, **changes: Any) -> Facts:
    memory = dataclasses.replace(facts.memory, available_bytes=size, **changes)
    return dataclasses.replace(facts, memory=memory)


def test_mountinfo() -> None:
    root, _, _, data, output, models = parse_mounts(MOUNTINFO)
    assert (root.path, root.kind) == ("/", "overlay")
    assert data == Mount(path="/data", root="/home/me/my images", kind="ext4", read_only=True)
    assert output == Mount(path="/output", root="/home/me/out", kind="ext4", read_only=False)
    assert models.read_only, "the disk itself is"
    assert parse_mounts("no mountinfo\n\n") == ()


def test_a_path_lies_on_its_nearest_mount_and_there_on_the_last() -> None:
    first, second, inner = mount("/a"), mount("/a", kind="xfs"), mount("/a/b")
    mounts = (ROOT, first, inner, second)
    assert holding("/a/c", mounts) is second
    assert holding("/a/b/c", mounts) is inner
    assert holding("/ab", mounts) is ROOT
    assert holding("/ab", ()) is None


@pytest.mark.parametrize("name", ["dgx-spark", "rtx-4090", "h200", "a100-80gb", "cpu"])
def test_machines_that_can_train(name: str) -> None:
    facts = machine(name)
    assert machine_problems(facts, "auto", None) == ()
    assert machine_problems(facts, select(facts)[0].name, name == "dgx-spark") == ()
    assert told(around(mount("/data"), mount("/output")), facts) == ()


@pytest.mark.parametrize("size", [GIB, 20 * GIB])
def test_unified_memory_without_headroom(size: int) -> None:
    facts = available(machine("dgx-spark"), size)
    assert [str(problem) for problem in machine_problems(facts, "auto", None)] == [
        f"unified memory: {size / GIB:.1f} GiB of 121.7 GiB are available, and 20.0 GiB must stay free for"
        " the host: nothing is left to train with\n"
        "    -> stop what else uses memory (docker ps, a notebook, a desktop)"
    ]
    assert machine_problems(available(facts, 20 * GIB + 1), "auto", None) == ()
    assert machine_problems(available(machine("rtx-4090"), size), "auto", None) == ()


def test_a_limit_on_the_container_is_named() -> None:
    facts = available(machine("cpu"), GIB, cgroup_limit_bytes=2 * GIB)
    (problem,) = machine_problems(facts, "cpu", None)
    assert problem.where == "host memory"
    assert problem.remedy.endswith(", or raise the container's memory limit of 2.0 GiB")


@pytest.mark.parametrize(
    ("name", "requested", "unified", "said"),
    [
        (
            "rtx-4090",
            "auto",
            True,
            "UNIFIED_MEMORY=true: it requires a GPU that shares its memory with the CPU:"
            " NVIDIA GeForce RTX 4090 has memory of its own\n"
            "    -> unset UNIFIED_MEMORY",
        ),
        (
            "dgx-spark",
            "cpu",
            True,
            "UNIFIED_MEMORY=true: it requires a GPU that shares its memory with the CPU: the profile is cpu\n"
            "    -> set TRAINER_PROFILE to auto, or unset UNIFIED_MEMORY",
        ),
        (
            "cpu",
            "auto",
            True,
            "UNIFIED_MEMORY=true: it requires a GPU that shares its memory with the CPU: the profile is cpu\n"
            "    -> unset UNIFIED_MEMORY",
        ),
        (
            "dgx-spark",
            "auto",
            False,
            "UNIFIED_MEMORY=false: it excludes NVIDIA GB10, which shares its memory with the CPU"
            " (profile dgx-spark)\n"
            "    -> unset UNIFIED_MEMORY, or set it to true",
        ),
        (
            "dgx-spark",
            "generic-cuda",
            False,
            "UNIFIED_MEMORY=false: it excludes NVIDIA GB10, which shares its memory with the CPU"
            " (profile generic-cuda)\n"
            "    -> unset UNIFIED_MEMORY, or set it to true",
        ),
    ],
)
def test_unified_memory_that_is_not_there(name: str, requested: str, unified: bool, said: str) -> None:
    facts = machine(name)
    assert [str(problem) for problem in machine_problems(facts, requested, unified)] == [said]
    with pytest.raises(HardwareError) as caught:
        require_memory_kind(facts, select(facts, requested)[0], unified)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("name", "requested", "unified"),
    [
        ("dgx-spark", "auto", True),
        ("dgx-spark", "generic-cuda", True),
        ("rtx-4090", "auto", False),
        ("dgx-spark", "cpu", False),
    ],
)
def test_unified_memory_that_is_as_said(name: str, requested: str, unified: bool) -> None:
    assert machine_problems(machine(name), requested, unified) == ()


def test_problems_of_a_machine_come_together() -> None:
    facts = dataclasses.replace(machine("dgx-spark"), driver=(550, 54, 14), driver_cuda=(12, 4))
    problems = machine_problems(available(facts, GIB), "auto", False)
    assert [problem.where for problem in problems] == [
        "UNIFIED_MEMORY=false",
        "driver 550.54.14",
        "unified memory",
    ]


def test_an_image_is_named_only_where_another_one_helps() -> None:
    old = dataclasses.replace(machine("rtx-4090"), driver=(470, 1), driver_cuda=(11, 4))
    (problem,) = machine_problems(old, "auto", None)
    assert "image" not in problem.remedy, "there is no image for CUDA 11"
    (problem,) = machine_problems(machine("too-old-gpu"), "auto", None)
    assert "image" not in problem.remedy
    (problem,) = machine_problems(dataclasses.replace(old, torch=None), "auto", None)
    assert problem.what == "torch is not installed" and "image" not in problem.remedy


def test_how_to_pass_a_gpu_is_told_where_one_is_missing_only() -> None:
    (problem,) = machine_problems(machine("no-gpu-cuda-torch"), "rtx-4090", None)
    for way in ("docker run --gpus all", "compose file", "nvidia.com/gpu: 1"):
        assert way in problem.remedy
    (problem,) = machine_problems(machine("h200"), "rtx-4090", None)
    assert "nvidia.com/gpu" not in problem.remedy


def test_every_profile_has_a_target() -> None:
    assert set(TARGETS) == set(PROFILES)


def test_a_foreign_cudnn() -> None:
    files = ("/opt/cudnn/lib/libcudnn.so.9", "/opt/cudnn/lib/libcudnn_ops.so.9", "/usr/x/libcudnn.so.8")
    said = (
        "LD_LIBRARY_PATH: a foreign cuDNN hides the one that torch brings, and torch aborts:"
        " /opt/cudnn/lib/libcudnn.so.9\n"
        "    -> take /opt/cudnn/lib and /usr/x out of it, or unset it",
    )
    assert told(around(cudnn=files), machine("h200")) == said
    assert told(around(cudnn=files), None) == said, "torch that aborts has no facts"
    assert told(around(cudnn=files), machine("h200"), "cpu") == ()
    assert told(around(cudnn=files), machine("cpu")) == ()


@pytest.mark.parametrize("wrong", MISPLACED)
def test_a_mount_where_others_have_theirs(wrong: str) -> None:
    ours = MISPLACED[wrong]
    volume = next(volume for volume in VOLUMES if volume.path == ours)
    end = ":ro" if volume.access == "ro" else ""
    for path in (wrong, f"{wrong}/deeper"):
        assert told(around(mount(path, root="/home/me/my things"))) == (
            f"{path}: a folder is mounted here, where nothing looks: {volume.meaning} belong on {ours}\n"
            f"    -> mount it there: -v '/home/me/my things':{ours}{end}",
        )
    assert told(around(mount(f"{wrong}2"), mount(ours))) == ()


@pytest.mark.parametrize("named", ["--dataset /datasets", "--dataset=/datasets/cats", "img_dir: /datasets\n"])
def test_a_mount_that_somebody_names_is_where_it_belongs(named: str) -> None:
    assert told(around(mount("/datasets/cats"), named=named)) == ()


@pytest.mark.parametrize(
    "named", ["/dataset", "/datasets-old", "/my/datasets", "x/datasets", "/datasets.bak"]
)
def test_a_name_that_is_another(named: str) -> None:
    assert len(told(around(mount("/datasets"), named=named))) == 1


@pytest.mark.parametrize(
    ("where", "changes", "remedy"),
    [
        (
            mount("/output", root="/home/me/out"),
            {},
            "on the host: sudo chown -R 10001:0 /home/me/out/lora (that is its path on its disk: where you"
            " mounted another one, chown that); in Kubernetes: securityContext.fsGroup",
        ),
        (
            mount("/output", root="/home/me/my out"),
            {"existing": "/output", "owner": 1000},
            "on the host: sudo chown -R 10001:0 '/home/me/my out' (that is its path on its disk: where you"
            " mounted another one, chown that); or run as its owner: docker run --user 1000:0;"
            " in Kubernetes: securityContext.fsGroup",
        ),
        (mount("/output", read_only=True), {}, "/output is mounted read-only: mount it without :ro"),
        (
            mount("/output", kind="tmpfs", root="/"),
            {},
            "--tmpfs /output:uid=10001,gid=0; in Kubernetes: securityContext.fsGroup",
        ),
        (mount("/else"), {}, 'mount a folder there: docker run -v "$PWD/output":/output'),
    ],
)
def test_a_folder_that_cannot_be_written(where: Mount, changes: dict[str, Any], remedy: str) -> None:
    asked = folder("/output/lora", **changes)
    assert told(around(where, folders=(asked,))) == (
        "/output/lora: the run's folder cannot be written by user 10001:0: Permission denied\n"
        f"    -> {remedy}",
    )
    assert told(around(where, folders=(dataclasses.replace(asked, error=""),))) == ()


@pytest.mark.parametrize("root", ["/", "/home", ""])
def test_no_chown_of_a_folder_of_the_host_itself(root: str) -> None:
    """A disk that is mounted whole has the root /: on the host that is another folder."""
    (said,) = told(around(mount("/output", root=root), folders=(folder("/output/a/b"),)))
    assert "sudo chown -R 10001:0 FOLDER, which is mounted on /output;" in said


def test_results_that_go_with_the_container() -> None:
    kept = folder("/output/lora", error="", is_result=True)
    assert list(warnings(around(folders=(kept,)))) == [
        "/output/lora is not on a mounted folder: what the run writes is gone with the container;"
        ' mount a folder there: docker run -v "$PWD/output":/output'
    ]
    podman = Surroundings(user="1:1", mounts=(mount("/", kind="fuse.fuse-overlayfs"),), folders=(kept,))
    assert len(list(warnings(podman))) == 1
    assert list(warnings(around(mount("/output"), folders=(kept,)))) == []
    assert list(warnings(around(folders=(dataclasses.replace(kept, is_result=False),)))) == []
    on_a_host = Surroundings(user="1:1", mounts=(mount("/"),), folders=(kept,))
    assert list(warnings(on_a_host)) == []


def thor() -> Facts:
    """Another integrated GPU, which no profile is named after."""
    facts = with_gpu(machine("dgx-spark"), capability=(11, 0), name="another integrated GPU")
    assert facts.torch is not None
    return dataclasses.replace(facts, torch=dataclasses.replace(facts.torch, arch_list=("sm_110",)))


@pytest.mark.parametrize("requested", ["auto", "generic-cuda"])
def test_memory_kind_goes_by_attributes(requested: str) -> None:
    assert machine_problems(thor(), requested, True) == ()
    (problem,) = machine_problems(thor(), requested, False)
    assert "which shares its memory with the CPU" in problem.what


@pytest.mark.parametrize(("facts", "requested"), [(thor(), "auto"), (machine("dgx-spark"), "generic-cuda")])
def test_the_floor_of_shared_memory_goes_by_attributes(facts: Facts, requested: str) -> None:
    assert machine_problems(facts, requested, None) == ()
    (problem,) = machine_problems(available(facts, 15 * GIB), requested, None)
    assert problem.where == "unified memory" and "20.0 GiB must stay free" in problem.what


def test_one_kind_of_gpu_that_can_train_is_enough() -> None:
    good, old = machine("h200"), dataclasses.replace(machine("too-old-gpu").gpu, total_memory_bytes=200 * GIB)
    assert machine_problems(dataclasses.replace(good, gpus=(old, *good.gpus)), "auto", None) == ()
    (problem,) = machine_problems(dataclasses.replace(good, gpus=(old,)), "auto", None)
    assert "carries no code" in problem.what
