"""The compose files as data."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import trainer
from tests.unit.container_files.compose_files import COMPOSE, Node, interpolated, load, services
from tests.unit.house.sources import ROOT
from trainer.config import environment, fields
from trainer.container import appliance
from trainer.container.appliance import TARGETS, VOLUMES
from trainer.machine.profiles import PROFILES

HELPER = "folders"
STUDIO = ("studio", "queue")
"""Services of `--profile ui`; test_studio has the rest about them."""
FILES = {
    "base.yaml",
    "monitoring.yaml",
    "two-sparks.yaml",
    *(f"{profile}.yaml" for profile in TARGETS),
}
HOST_VARIABLES = {f"TRAINER_{volume.name.upper()}": volume for volume in VOLUMES}
"""The variables on the host that say which folder is mounted where."""
MACHINE_ID = "/etc/machine-id"
QUICKSTART = "train_configs/quickstart.yaml"
SHARED_MEMORY_BYTES = 1024**3
"""Size of /dev/shm that NCCL's manual gives."""


def seconds(duration: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([smh])", duration).groups()  # type: ignore[union-attr]
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


@pytest.fixture(params=TARGETS)
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_there_is_one_file_for_each_profile() -> None:
    assert set(TARGETS) == set(PROFILES)
    assert {path.name for path in COMPOSE.glob("*.yaml")} == FILES
    for name in FILES:
        assert "version" not in load(name), "compose v2 warns about it"


def test_a_file_is_complete(profile: str) -> None:
    """One `-f` is enough: the file holds every secret, and every service that another one waits for."""
    content, found = load(f"{profile}.yaml"), services(profile)
    assert content["name"] == "trainer"
    assert set(found) == {"trainer", HELPER, *STUDIO}
    for service in found.values():
        assert set(service.get("depends_on", {})) <= set(found)
        assert set(service.get("secrets", [])) <= set(content["secrets"])
    assert found[HELPER]["attach"] is False, "its end would end `up --exit-code-from trainer`"
    assert found["trainer"]["depends_on"] == {HELPER: {"condition": "service_completed_successfully"}}


def test_image_target_and_profile_are_named_alike(profile: str) -> None:
    found = services(profile)
    image = f"${{TRAINER_IMAGE:-trainer:{trainer.__version__}-{profile}}}"
    assert {service["image"] for service in found.values()} == {image}
    build = found["trainer"]["build"]
    assert (build["context"], build["dockerfile"], build["target"]) == ("..", "docker/Dockerfile", profile)
    assert interpolated(found["trainer"]["environment"]["TRAINER_PROFILE"], {}) == profile


def test_the_build_is_the_dockerfiles(profile: str) -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text()
    build = services(profile)["trainer"]["build"]
    assert re.search(rf"^FROM \S+ AS {re.escape(build['target'])}$", text, re.MULTILINE)
    for argument, value in build["args"].items():
        # every builder knows proxies, and keeps them out of the image
        known = argument in appliance.PROXIES or re.search(rf"^ARG {argument}=", text, re.MULTILINE)
        assert known, f"{argument} is no argument of it"
        assert value is None, "the Dockerfile has the default"


def test_volumes_are_those_of_the_table(profile: str) -> None:
    for name, service in services(profile).items():
        mounts = {mount["target"]: mount for mount in service["volumes"] if mount["target"] != MACHINE_ID}
        assert list(mounts) == [volume.path for volume in VOLUMES]
        for variable, volume in HOST_VARIABLES.items():
            mount = mounts[volume.path]
            assert mount["type"] == "bind", "a bare word as folder must not become a named volume"
            assert mount["source"] == f"${{{variable}:-../{volume.name}}}"
            assert mount["bind"] == {"create_host_path": True}, "the first `up` must not fail for a folder"
            # the helper hands new folders to the user, which is all that it does with them
            read_only = volume.access == "ro" and name != HELPER
            if name == "studio":  # the only writer of data sets, and no reader of anything new for /models
                read_only = volume.path in ("/config", "/models")
            assert mount.get("read_only", False) == read_only, (name, volume.path)


def test_the_user_is_the_callers_or_the_images(profile: str) -> None:
    found = services(profile)
    user = found["trainer"]["user"]
    assert interpolated(user, {}) == f"{appliance.USER}:{appliance.GROUP}"
    assert interpolated(user, {"UID": "1000"}) == f"1000:{appliance.GROUP}"
    assert found[HELPER]["environment"] == {"OWNER": user}


def test_a_stop_may_take_as_long_as_saving(profile: str) -> None:
    service = services(profile)["trainer"]
    assert seconds(service["stop_grace_period"]) == appliance.GRACE_SECONDS
    assert service["restart"] == "no"
    assert "init" not in service, "tini is in the image"
    assert "stop_signal" not in service


def test_health_is_asked_as_the_image_asks(profile: str) -> None:
    check = services(profile)["trainer"]["healthcheck"]
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    line = re.search(r"^HEALTHCHECK (?P<options>.*) CMD (?P<command>\[.*\])$", dockerfile, re.MULTILINE)
    assert line is not None
    options = dict(re.findall(r"--([\w-]+)=(\S+)", line["options"]))
    assert {name.replace("_", "-"): str(value) for name, value in check.items() if name != "test"} == options
    assert check["test"] == ["CMD", *yaml.safe_load(line["command"])] == ["CMD", "trainer", "health"]


def test_shared_memory_is_the_containers_own(profile: str) -> None:
    service = services(profile)["trainer"]
    assert service["ipc"] == "private", "with the host's, a killed run leaves its shared memory behind"
    assert service["shm_size"] == f"{SHARED_MEMORY_BYTES // 1024**3}g", "docker's g is 2**30 bytes"
    assert "ulimits" not in service, "nothing here needs locked memory beyond the driver's own"


def test_only_gpu_profiles_ask_for_gpus(profile: str) -> None:
    found = services(profile)
    assert "deploy" not in found[HELPER]
    if PROFILES[profile].device == "cpu":
        assert "deploy" not in found["trainer"]
    else:
        (device,) = found["trainer"]["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "${TRAINER_GPUS:-all}", "capabilities": ["gpu"]}
        assert interpolated(device["count"], {}) == "all"
        assert interpolated(device["count"], {"TRAINER_GPUS": "2"}) == "2"
    assert "runtime" not in found["trainer"], "the nvidia runtime may not be registered"


def test_the_environment_fits_the_profile(profile: str) -> None:
    variables = services(profile)["trainer"]["environment"]
    # false would refuse machines that generic-cuda is for; elsewhere offloading is the caller's choice
    unified = {"UNIFIED_MEMORY": "true", "DISABLE_CPU_OFFLOAD": "true"}
    assert {name: interpolated(variables[name], {}) for name in unified if name in variables} == (
        unified if PROFILES[profile].match.integrated else {}
    )
    known = {variable.name for variable in environment.VARIABLES}
    known |= set(appliance.SECRET_FILES)
    assert set(variables) <= known
    assert not set(variables) & set(appliance.IMAGE_ENVIRONMENT), "the image has set it"
    for name, value in variables.items():
        if value and "$" in value:
            assert re.match(rf"\$\{{{name}:-", value), (
                "a variable on the host has the name that it has inside"
            )


def test_host_variables_disturb_no_trainer_on_the_host() -> None:
    """People who export these variables may also run the trainer without a container."""
    exported = {*HOST_VARIABLES, "TRAINER_COMMAND", "TRAINER_GPUS", "TRAINER_IMAGE"}
    assert not exported & {variable.name for variable in environment.VARIABLES}
    assert environment.misspelt(dict.fromkeys(exported, "x"), fields.dotted_keys()) == []


def test_every_variable_is_explained_and_used() -> None:
    for name, used_in in (
        ("base.yaml", ("base.yaml", "cpu.yaml", "generic-cuda.yaml")),
        ("monitoring.yaml", ("monitoring.yaml",)),
        ("two-sparks.yaml", ("two-sparks.yaml",)),
    ):
        text = (COMPOSE / name).read_text()
        comments = "\n".join(re.findall(r"^#(.*)$", text, re.MULTILINE))
        explained = set(re.findall(r"\b(?:[A-Z][A-Z_]+_[A-Z]+|UID|EXTRAS)\b", comments))
        used = set()
        for file in used_in:
            body = "\n".join(re.findall(r"^[^#].*$", (COMPOSE / file).read_text(), re.MULTILINE))
            used |= set(re.findall(r"(?<!\$)\$\{(\w+)", body))
            used |= set(re.findall(r"^ {6,}([A-Z_]+): *(?:#.*)?$", body, re.MULTILINE))
        unexplained = used - explained - {"BASE_IMAGE", "PIP_NO_INDEX", *appliance.PROXIES}
        assert not unexplained, f"{name} does not say what {unexplained} are"
        used |= set((COMPOSE / "variables.env").read_text().split())
        assert explained <= used, f"{name} explains {explained - used}, which nothing reads"


def test_defaults_in_comments_are_the_defaults() -> None:
    text = (COMPOSE / "base.yaml").read_text()
    for variable, volume in HOST_VARIABLES.items():
        assert re.search(rf"^#   {variable} +\.\./{volume.name} .* {volume.path}\b", text, re.MULTILINE)
    assert re.search(rf"^#   UID +{appliance.USER} ", text, re.MULTILINE)
    assert re.search(rf"^#   METRICS_PORT +{appliance.METRICS_PORT} ", text, re.MULTILINE)


def test_without_a_word_the_quickstart_is_trained(profile: str) -> None:
    words = interpolated(services(profile)["trainer"]["command"], {}).split()
    assert words == ["train", f"{appliance.PREFIX}/{QUICKSTART}", "--output", "/output/quickstart"]
    assert (ROOT / QUICKSTART).is_file()
    # its paths are relative: the image must start where its files are
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    assert re.search(rf"^WORKDIR {appliance.PREFIX}$", dockerfile, re.MULTILINE)
    assert "working_dir" not in services(profile)["trainer"]


def test_only_the_loopback_address_can_ask_for_metrics(profile: str) -> None:
    found = services(profile)
    (port,) = found["trainer"]["ports"]
    assert interpolated(port, {}) == f"127.0.0.1:{appliance.METRICS_PORT}:{appliance.METRICS_PORT}"
    assert interpolated(port, {"METRICS_PORT": "1"}) == f"127.0.0.1:1:{appliance.METRICS_PORT}"
    assert "ports" not in found[HELPER]


def test_a_token_comes_from_a_file_and_may_be_missing(profile: str) -> None:
    service, files = services(profile)["trainer"], load(f"{profile}.yaml")["secrets"]
    assert set(service["secrets"]) == set(files)
    assert len(files) == len(appliance.SECRET_FILES)
    for name in appliance.SECRET_FILES:
        folder, _, secret = service["environment"][name].rpartition("/")
        assert folder == "/run/secrets" and secret in service["secrets"]
        plain = name.removesuffix("_FILE")
        assert plain not in service["environment"], "`docker inspect` shows the environment"
        default = COMPOSE / interpolated(files[secret]["file"], {})
        assert default.read_bytes() == b"", "no token is an empty file"
        assert interpolated(files[secret]["file"], {name: "/a/token"}) == "/a/token"


def assert_confined(service: Node) -> None:
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert 0 < service["pids_limit"] <= 4096
    options = service["logging"]["options"]
    assert service["logging"]["driver"] == "json-file", "other drivers know other options"
    assert re.fullmatch(r"\d+m", options["max-size"]) and int(options["max-file"]) >= 1
    forbidden = {"privileged", "devices", "userns_mode", "cgroup_parent", "pid", "container_name"}
    assert not forbidden & set(service)
    assert service.get("network_mode", "none") == "none"
    assert service.get("ipc", "private") == "private"


def test_services_may_do_no_more_than_they_must(profile: str) -> None:
    found = services(profile)
    for service in found.values():
        assert_confined(service)
        assert service["read_only"] is True
    assert "cap_add" not in found["trainer"]
    assert found[HELPER]["cap_add"] == ["CHOWN"]
    assert found[HELPER]["network_mode"] == "none"
    mounts = dict(mount.split(":", 1) for mount in found["trainer"]["tmpfs"])
    assert set(mounts) == {"/tmp", appliance.RUNTIME_DIR}
    for options in mounts.values():
        # any user writes there, and it comes out of the machine's memory
        assert "mode=1777" in options and "size=" in options
    assert found["trainer"]["oom_score_adj"] > 0, "the run goes before what lets people log in"


def test_monitoring_stays_on_this_machine() -> None:
    found = load("monitoring.yaml")["services"]
    assert set(found) == {"prometheus", "grafana", "node-exporter", "dcgm-exporter"}
    for name, service in found.items():
        assert_confined(service)
        assert "cap_add" not in service
        assert service.get("read_only", False) == (name != "dcgm-exporter")
        assert re.search(r":-[\w./-]+:v?\d[\w.-]+\}$", service["image"]), "a version, and a variable for it"
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
        for mount in service.get("volumes", []):
            if isinstance(mount, dict):
                assert mount["read_only"] is True
                assert (COMPOSE / mount["source"]).exists()
    # where the driver reports no memory, or there is no GPU, nobody gets it without asking
    assert found["dcgm-exporter"]["profiles"] == ["dcgm"]
    assert all("profiles" not in service for name, service in found.items() if name != "dcgm-exporter")
    for profile, policy in PROFILES.items():
        text = (COMPOSE / f"{profile}.yaml").read_text()
        assert ("--profile dcgm" in text) == (policy.device == "cuda" and not policy.match.integrated)


def test_the_files_speak_to_people(profile: str) -> None:
    text = (COMPOSE / f"{profile}.yaml").read_text()
    assert f"docker compose -f compose/{profile}.yaml up\n" in text
    for name in FILES:
        for number, line in enumerate((COMPOSE / name).read_text().splitlines(), 1):
            assert len(line) <= 160, f"compose/{name}:{number}"


# ---- the helper's script, for real


def test_new_folders_go_to_the_user_and_others_stay(tmp_path: Path) -> None:
    """With commands that say what they would do: only root may really change an owner."""
    script = load("base.yaml")["services"][HELPER]["command"][0].replace("$$", "$")
    paths = {volume.path: tmp_path / volume.name for volume in VOLUMES}
    for path, folder in paths.items():
        script = re.sub(rf"(?<![\w/]){path}(?=[ ;])", str(folder), script)
        folder.mkdir()
    (paths["/output"] / "run").mkdir()
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool, body in {
        "stat": f'case "$3" in {paths["/models"]}) echo 1000;; *) echo 0;; esac',
        "chmod": f'[ "$2" != {paths["/cache"]} ]',
        "chown": 'echo "$1 gets $2"',
    }.items():
        (tools / tool).write_text(f"#!/bin/sh\n{body}\n")
        (tools / tool).chmod(0o755)
    run = subprocess.run(
        ["/bin/sh", "-eu", "-c", script],
        env={"PATH": f"{tools}:{os.defpath}", "OWNER": "1234:0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        f"1234:0 gets {paths['/data']}",
        f"1234:0 gets {paths['/config']}",
        f"{paths['/cache']} stays as it is: see the line above",
    ]


def test_the_version_is_the_packages() -> None:
    """Tags follow the version: a release that forgets these files fails here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "trainer.__version__"}
    for name in FILES:
        tags = re.findall(r"trainer:(\d[\w.]*)-", (COMPOSE / name).read_text())
        assert set(tags) <= {trainer.__version__}
