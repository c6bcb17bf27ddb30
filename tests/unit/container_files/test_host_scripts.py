"""scripts/setup_host.sh and scripts/test_container.sh, run for real among fake programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.container_files import fake_docker
from tests.unit.container_files.fake_host import Host, os_release, real
from tests.unit.house.sources import ROOT
from trainer.container.appliance import GRACE_SECONDS, METRICS_PORT
from trainer.errors import ExitCode
from trainer.machine.facts import facts_from_json
from trainer.machine.profiles import PROFILES, select
from trainer.planning.torch_and_driver import FIRST_DRIVER

SETUP, TEST = "scripts/setup_host.sh", "scripts/test_container.sh"
MACHINES = sorted((ROOT / "tests/golden/machines").glob("*.json"))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(folder=tmp_path)


def to_dos(output: str) -> dict[str, str]:
    """TO DO entries by the name of their part: the line and its remedies."""
    blocks = re.findall(r"^TO DO  ([^:]+):(.*(?:\n {9}.*)*)", output, re.MULTILINE)
    return dict(blocks)


def test_a_good_host_has_nothing_to_do(host: Host) -> None:
    result = host.run(SETUP)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not to_dos(result.stdout)
    oks = [line for line in result.stdout.splitlines() if line.startswith("ok ")]
    assert result.stdout.splitlines()[-1] == f"{len(oks)} ok, 0 to do"
    assert "ok     GPU: NVIDIA H200, compute capability 9.0: image and profile hopper-fp8" in oks
    assert len(oks) == 12
    assert host.changes() == []


@pytest.mark.parametrize(
    ("environ", "part", "remedy"),
    [
        ({"TOOLKIT": "1.17.6"}, "container toolkit", "nvidia-container-toolkit"),
        ({"TOOLKIT": "1.9.12"}, "container toolkit", "nvidia-container-toolkit"),
        ({"DRIVER": "570.172.08"}, "driver", "580"),
        ({"DRIVER": "99.1"}, "driver", "580"),
        ({"SMI_FAILS": "Failed to initialize NVML: Driver/library version mismatch"}, "driver", "reboot"),
        ({"DOCKER": "24.0.7"}, "Docker", "Docker"),
        ({"NO_ENGINE": "1"}, "Docker", "sudo systemctl enable --now docker"),
        ({"NO_COMPOSE": "1"}, "Compose", "docker-compose-plugin"),
        ({"COMPOSE": "1.29.2"}, "Compose", "docker-compose-plugin"),
        ({"NO_RUNTIME": "1"}, "Docker's runtime", "sudo nvidia-ctk runtime configure --runtime=docker"),
        ({"NO_CDI": "1"}, "CDI", "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"),
        ({"FREE_KIB": str(39 * 1024**2)}, "disk", "docker image prune"),
        ({"DF_FAILS": "/"}, "disk", "df -Pk /"),
        ({"SHM_USED_KIB": str(2 * 1024**2)}, "shared memory", "/dev/shm"),
        ({"DF_FAILS": "/dev/shm"}, "shared memory", "sudo mount -t tmpfs"),
        ({"DRIVER": "[Unknown Error]"}, "driver", "sudo reboot"),
        ({"TOOLKIT": "?"}, "container toolkit", "nvidia-container-toolkit"),
        ({"MACHINE": "riscv64"}, "processor", "x86_64 or aarch64"),
    ],
    ids=str,
)
def test_each_fault_is_found_alone_and_changes_nothing(
    host: Host, environ: dict[str, str], part: str, remedy: str
) -> None:
    result = host.run(SETUP, environ=environ)
    assert result.returncode == 1
    found = to_dos(result.stdout)
    assert list(found) == [part], result.stdout
    assert remedy in found[part]
    assert result.stdout.splitlines()[-1].endswith("ok, 1 to do")
    assert host.changes() == []


@pytest.mark.parametrize(
    ("absent", "part"),
    [("nvidia-smi", "driver"), ("docker", "Docker"), ("nvidia-ctk", "container toolkit")],
)
def test_what_is_not_installed_is_named(tmp_path: Path, absent: str, part: str) -> None:
    host = Host(folder=tmp_path, absent=frozenset({absent}))
    result = host.run(SETUP)
    assert result.returncode == 1
    assert list(to_dos(result.stdout)) == [part], result.stdout
    assert not result.stderr


def test_a_host_for_the_cpu_image_needs_neither_driver_nor_toolkit(tmp_path: Path) -> None:
    host = Host(folder=tmp_path, absent=frozenset({"nvidia-smi", "nvidia-ctk"}))
    result = host.run(SETUP, "--cpu", environ={"DOCKER": "20.10.24"})
    assert (result.returncode, to_dos(result.stdout)) == (0, {}), result.stdout
    assert list(to_dos(host.run(SETUP, "--cpu", environ={"DOCKER": "19.3.1"}).stdout)) == ["Docker"]
    assert host.run(SETUP, "--cpu", "--apply").returncode == 2


def test_a_user_without_the_group_is_told_the_command(host: Host) -> None:
    """The command is told only where the engine does not answer: rootless engines need no group."""
    environ = {"GROUPS_OF_USER": "tester"}
    assert host.run(SETUP, environ=environ).returncode == 0
    result = host.run(SETUP, environ={**environ, "NO_ENGINE": "1"})
    assert "sudo usermod -aG docker tester" in to_dos(result.stdout)["user"]
    assert "user" not in to_dos(host.run(SETUP, environ={"USER_ID": "0", "NO_ENGINE": "1"}).stdout)


@pytest.mark.parametrize(
    ("release", "command"),
    [
        ("ID=ubuntu\nID_LIKE=debian\n", "sudo apt-get install -y nvidia-container-toolkit"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "sudo dnf install -y nvidia-container-toolkit"),
        ('ID="opensuse-leap"\nID_LIKE="suse opensuse"\n', "sudo zypper install -y nvidia-container-toolkit"),
        ("ID=arch\n", "install with your distribution's tools: nvidia-container-toolkit"),
    ],
    ids=["ubuntu", "rocky", "opensuse", "arch"],
)
def test_commands_suit_the_distribution(host: Host, release: str, command: str) -> None:
    os_release(host, release)
    found = to_dos(host.run(SETUP, environ={"TOOLKIT": "1.16.2"}).stdout)
    assert command in found["container toolkit"]


@pytest.mark.parametrize(
    ("release", "packages"),
    [
        ('ID=debian\nVERSION_ID="12"\n', ""),
        ('ID=debian\nVERSION_ID="13"\n', "docker.io docker-cli docker-buildx docker-compose"),
        # testing has no number
        ("ID=debian\n", "docker.io docker-cli docker-buildx docker-compose"),
        ('ID=ubuntu\nVERSION_ID="24.04"\nID_LIKE=debian\n', "docker.io docker-buildx docker-compose-v2"),
        ('ID=rocky\nVERSION_ID="9.4"\n', ""),
    ],
    ids=["debian 12", "debian 13", "debian testing", "ubuntu", "rocky"],
)
def test_packages_of_docker_are_only_named_where_they_are_new_enough(
    tmp_path: Path, release: str, packages: str
) -> None:
    host = Host(folder=tmp_path, absent=frozenset({"docker"}))
    os_release(host, release)
    remedy = to_dos(host.run(SETUP).stdout)["Docker"]
    if packages:
        assert remedy.endswith(f"sudo apt-get update && sudo apt-get install -y {packages}")
    else:
        assert "apt-get" not in remedy and "plugins buildx and compose" in remedy and "manual" in remedy


def test_wsl_gets_its_driver_from_windows(host: Host) -> None:
    os_release(host, "ID=ubuntu\n", kernel="Linux version 6.6 (Microsoft standard WSL2)")
    remedy = to_dos(host.run(SETUP, environ={"DRIVER": "551.23"}).stdout)["driver"]
    assert "Windows" in remedy
    assert "nvidia-driver-580" not in remedy


@pytest.mark.parametrize("machine", MACHINES, ids=lambda path: path.stem)
def test_the_profile_named_is_the_one_that_auto_takes(host: Host, machine: Path) -> None:
    facts = facts_from_json(machine.read_text(), machine.name)
    if not facts.gpus:
        pytest.skip("a machine without GPU")
    gpu = facts.gpus[0]
    capability = f"{gpu.capability[0]}.{gpu.capability[1]}"
    said = host.run(SETUP, environ={"GPU": f"{capability}, {gpu.name}"}).stdout
    profile, _ = select(facts)
    assert f"image and profile {profile.name}\n" in said


def test_other_cards_of_the_4090s_generation_are_generic(host: Host) -> None:
    assert "profile generic-cuda\n" in host.run(SETUP, environ={"GPU": "8.9, NVIDIA L4"}).stdout


BARE = {"NO_RUNTIME": "1", "NO_CDI": "1"}
CONFIGURE = [
    "nvidia-ctk runtime configure --runtime=docker",
    "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
]
RESTART = "systemctl restart docker"


@pytest.mark.parametrize(
    ("answers", "arguments", "restarted"),
    [("y\n", (), True), ("n\n", (), False), ("", (), False), ("", ("--yes",), True)],
    ids=["asked, yes", "asked, no", "nobody answers", "--yes"],
)
def test_apply_configures_and_asks_before_it_restarts_docker(
    host: Host, answers: str, arguments: tuple[str, ...], restarted: bool
) -> None:
    result = host.run(SETUP, "--apply", *arguments, answers=answers, environ=BARE)
    assert host.changes() == [*CONFIGURE, *([RESTART] if restarted else [])]
    assert ("2 containers are running" in result.stdout) == (not arguments)
    assert ("Docker was not restarted" in result.stdout) != restarted
    assert [call for call in host.calls if call.startswith("sudo")] == [
        f"sudo {call}" for call in host.changes()
    ]


def test_apply_goes_on_where_no_engine_answers(host: Host) -> None:
    result = host.run(SETUP, "--apply", "--yes", environ={"NO_RUNTIME": "1", "NO_ENGINE": "1"})
    assert host.changes() == ["nvidia-ctk runtime configure --runtime=docker", "systemctl restart docker"]
    assert result.stdout.splitlines()[-1].endswith("to do")


def test_apply_needs_no_sudo_for_root(host: Host) -> None:
    host.run(SETUP, "--apply", "--yes", environ={**BARE, "USER_ID": "0"})
    assert host.changes() == [*CONFIGURE, RESTART]
    assert not [call for call in host.calls if call.startswith("sudo")]


def test_apply_leaves_alone_what_is_configured(host: Host) -> None:
    assert host.run(SETUP, "--apply", "--yes").returncode == 0
    assert host.changes() == []


def test_apply_installs_nothing(tmp_path: Path) -> None:
    host = Host(folder=tmp_path, absent=frozenset({"nvidia-ctk"}))
    result = host.run(SETUP, "--apply", "--yes", environ=BARE)
    assert result.returncode == 1
    assert "nothing can be configured before the container toolkit is installed" in result.stdout
    assert host.changes() == []


@pytest.mark.parametrize("script", [SETUP, TEST])
def test_help_explains_every_option(host: Host, script: str) -> None:
    result = host.run(script, "--help")
    assert result.returncode == 0
    options = set(re.findall(r"^ +(--[a-z]+)(?:\)| \|)", (ROOT / script).read_text(), re.MULTILINE)) - {
        "--help"
    }
    assert len(options) >= 2
    for option in options:
        assert re.search(rf"^  {option}\b", result.stdout, re.MULTILINE), option
    assert "Examples:" in result.stdout


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (SETUP, ("--aply",)),
        (SETUP, ("--yes",)),
        (TEST, ()),
        (TEST, ("one", "two")),
        (TEST, ("--timeout", "soon", "image")),
        (TEST, ("--gpu", "image")),
    ],
)
def test_wrong_arguments_end_with_2(host: Host, script: str, arguments: tuple[str, ...]) -> None:
    result = host.run(script, *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert not host.calls


def test_numbers_are_those_of_the_code() -> None:
    setup, test = ((ROOT / script).read_text() for script in (SETUP, TEST))
    assert f"MIN_DRIVER={FIRST_DRIVER[13]}\n" in setup
    assert f"GRACE_SECONDS={GRACE_SECONDS}\n" in test
    assert f"STOPPED={ExitCode.STOPPED.value}\n" in test
    assert f"METRICS_PORT={METRICS_PORT}\n" in test
    assert set(re.findall(r"echo ([a-z0-9-]+) ;;", setup.split("profile_for()")[1].split("\n}\n")[0])) < set(
        PROFILES
    )


@pytest.fixture(scope="module")
def docker_program() -> Iterator[str]:
    with fake_docker.serving() as program:
        yield program


@pytest.fixture
def engine(host: Host, docker_program: str) -> Host:
    """A host whose docker plays containers, and whose temporary folder is the test's."""
    host.run(SETUP, "--help")  # lays the tools out
    (host.folder / "bin/docker").write_text(docker_program)
    (host.folder / "state").mkdir()
    (host.folder / "tmp").mkdir()
    # the real ones: files get an owner
    for name in ("id", "df"):
        (host.folder / "bin" / name).unlink()
        (host.folder / "bin" / name).symlink_to(real(name))
    return host


def container_test(
    engine: Host, fault: str = "", *arguments: str
) -> tuple[dict[str, str], subprocess.CompletedProcess[str]]:
    """`pass` or `FAIL` by check, and how the script ended."""
    environ = {
        "STATE": str(engine.folder / "state"),
        "TMPDIR": str(engine.folder / "tmp"),
        "FAULT": fault,
        "MACHINE": "x86_64",
    }
    result = engine.run(TEST, "trainer:test", "--timeout", "1", *arguments, environ=environ)
    verdicts = re.findall(r"^(pass|FAIL)  (\w+)", result.stdout, re.MULTILINE)
    return {check: verdict for verdict, check in verdicts}, result


CHECKS = ["image", "version", "gpu", "kernels", "train", "proof", "health", "metrics", "stop", "resume"]


@pytest.mark.parametrize("arguments", [(), ("--cpu",)], ids=["gpu", "cpu"])
def test_a_good_image_passes_every_check_and_leaves_nothing(engine: Host, arguments: tuple[str, ...]) -> None:
    verdicts, result = container_test(engine, "", *arguments)
    expected = [check for check in CHECKS if not (arguments and check in ("gpu", "kernels"))]
    assert verdicts == dict.fromkeys(expected, "pass"), result.stdout + result.stderr
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1] == f"{len(expected)} passed, 0 failed"
    assert [path.name for path in (engine.folder / "state").iterdir()] == ["calls"]
    assert not list((engine.folder / "tmp").iterdir())


@pytest.mark.parametrize(
    ("fault", "failing"),
    [
        ("version", ["version"]),
        ("gpu", ["gpu"]),
        ("kernels", ["kernels"]),
        ("fallback", ["kernels"]),
        ("train", ["train"]),
        ("no lora", ["train"]),
        ("cpu", ["train"]),
        ("proof", ["proof"]),
        ("health", ["health", "resume"]),
        ("docker health", ["health", "resume"]),
        ("metrics", ["metrics"]),
        ("stop", ["stop", "resume"]),
        ("no checkpoint", ["stop", "resume"]),
        ("half a checkpoint", ["stop", "resume"]),
        ("old checkpoint", ["resume"]),
        ("resume", ["resume"]),
        ("dies", ["health", "metrics", "stop", "resume"]),
        ("root", ["image"]),
    ],
)
def test_a_bad_image_fails_the_checks_that_it_breaks(engine: Host, fault: str, failing: list[str]) -> None:
    verdicts, result = container_test(engine, fault)
    assert list(verdicts) == CHECKS, result.stdout + result.stderr
    assert [check for check in CHECKS if verdicts[check] == "FAIL"] == failing, result.stdout
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == f"{10 - len(failing)} passed, {len(failing)} failed"
    assert [path.name for path in (engine.folder / "state").iterdir()] == ["calls"]
    assert not list((engine.folder / "tmp").iterdir())


@pytest.mark.parametrize("fault", ["image", "architecture"])
def test_nothing_is_started_from_an_image_that_cannot_run(engine: Host, fault: str) -> None:
    verdicts, result = container_test(engine, fault)
    assert verdicts == {"image": "FAIL"}
    assert result.returncode == 1
    assert result.stdout.splitlines()[-1] == "0 passed, 1 failed"
    assert '"run"' not in (engine.folder / "state/calls").read_text()


def test_containers_are_as_locked_up_as_the_manual_says(engine: Host) -> None:
    container_test(engine)
    runs = [
        line for line in (engine.folder / "state/calls").read_text().splitlines() if line.startswith('["run"')
    ]
    assert len(runs) == 7
    user = os.getuid() or 10001
    for line in runs:
        for option in (
            f'"--user", "{user}:0"',
            '"--network", "none"',
            '"--read-only"',
            '"--cap-drop", "ALL"',
            '"--gpus", "all"',
        ):
            assert option in line


def test_keep_leaves_the_logs(engine: Host) -> None:
    _, result = container_test(engine, "train", "--keep")
    folder = Path(re.findall(r"^logs and results: (.+)$", result.stdout, re.MULTILINE)[0])
    assert folder.parent == engine.folder / "tmp"
    assert "profile" in (folder / "train.log").read_text()


@pytest.mark.parametrize("script", [SETUP, TEST])
def test_scripts_are_executable_and_clean(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o111 == 0o111
    checked = subprocess.run(
        [str(Path(sys.executable).parent / "shellcheck"), str(ROOT / script)], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout
