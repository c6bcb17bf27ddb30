"""The compose files read by compose itself, where it is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import render_compose
from tests.unit.container_files.compose_files import COMPOSE, config, interpolated, services
from tests.unit.container_files.test_compose import HELPER, SHARED_MEMORY_BYTES
from tests.unit.house.sources import ROOT
from trainer.config import environment, launchers
from trainer.container import appliance
from trainer.container.appliance import VOLUMES


@pytest.fixture(params=appliance.TARGETS)
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_compose_understands_each_file_alone(profile: str, tmp_path: Path) -> None:
    found = config(["-f", str(COMPOSE / f"{profile}.yaml")], tmp_path)
    service, expected = found["services"]["trainer"], services(profile)["trainer"]
    assert set(found["services"]) == {"trainer", HELPER}
    assert service["command"] == interpolated(expected["command"], {}).split()
    assert {mount["target"]: mount["source"] for mount in service["volumes"]} == {
        volume.path: str(ROOT / volume.name) for volume in VOLUMES
    }
    variables = expected["environment"]
    assert service["environment"] == {
        name: None if value is None else interpolated(value, {}) for name, value in variables.items()
    }
    assert (service["build"]["context"], service["build"]["target"]) == (str(ROOT), profile)
    (port,) = service["ports"]
    assert (port["host_ip"], port["target"]) == ("127.0.0.1", appliance.METRICS_PORT)
    assert found["secrets"]["hf_token"]["file"] == str(COMPOSE / "no-token")


def test_compose_takes_what_people_set(tmp_path: Path) -> None:
    found = config(
        ["-f", str(COMPOSE / "cpu.yaml")],
        tmp_path,
        TRAINER_DATA="/srv/cats",
        TRAINER_OUTPUT="here",
        TRAINER_COMMAND="train /config/my.yaml --set 'model.revision=a b'",
        UID="1000",
        HF_TOKEN_FILE="/srv/token",
        CUDA_VISIBLE_DEVICES="1",
    )
    service, helper = found["services"]["trainer"], found["services"][HELPER]
    sources = {mount["target"]: mount["source"] for mount in service["volumes"]}
    assert sources["/data"] == "/srv/cats"
    assert sources["/output"] == str(COMPOSE / "here"), "relative folders start at the compose files"
    assert {mount["target"]: mount["source"] for mount in helper["volumes"]} == sources
    assert service["command"] == ["train", "/config/my.yaml", "--set", "model.revision=a b"]
    assert (service["user"], helper["environment"]["OWNER"]) == ("1000:0", "1000:0")
    assert service["environment"]["CUDA_VISIBLE_DEVICES"] == "1"
    assert found["secrets"]["hf_token"]["file"] == "/srv/token"


def test_the_run_gets_the_hosts_variables_and_no_empty_ones(profile: str, tmp_path: Path) -> None:
    given = {
        "TRAINER_PROFILE": "auto",
        "UNIFIED_MEMORY": "false",
        "DISABLE_CPU_OFFLOAD": "false",
        "TRAINER__TRAIN__SEED": "7",
        "TRAINER__LORA__TARGET_MODULES": "a b #c",
        "WANDB_MODE": "offline",
        "HTTPS_PROXY": "http://proxy:3128",
        "no_proxy": "localhost",
    }
    files = ["-f", str(COMPOSE / f"{profile}.yaml")]
    bare = config(files, tmp_path)["services"]["trainer"]
    assert None not in bare["environment"].values() and "" not in bare["environment"].values()
    service = config(files, tmp_path, **given)["services"]["trainer"]
    assert service["environment"] == {**bare["environment"], **given}
    assert service["build"]["args"] == {"HTTPS_PROXY": given["HTTPS_PROXY"]}


def test_what_is_handed_in_is_listed_and_nothing_that_means_another_place_inside() -> None:
    assert render_compose.LISTED.read_text() == render_compose.listed(), "run make docs"
    names = set(appliance.HANDED_IN)
    known = {variable.name for variable in environment.VARIABLES}
    assert names <= known
    assert not names & {*appliance.IMAGE_ENVIRONMENT, *appliance.SECRETS}
    # the rest: folders, files and interfaces, which are others in a container, secrets, what launchers in it
    # and the queue set for their own runs, and the port, that has its own
    rest = known - names - appliance.IMAGE_ENVIRONMENT.keys() - {*launchers.VARIABLES}
    elsewhere = re.compile(r"_(DIR|PATH|FILE|FACTS|CACHE|HOME|KEY|TOKEN|IFNAME)$")
    assert {one for one in rest if not elsewhere.search(one)} == {"TRAINER_METRICS_PORT", "TRAINER_QUEUE_JOB"}


def test_compose_hands_in_all_gpus_or_as_many_as_people_say(tmp_path: Path) -> None:
    files = ["-f", str(COMPOSE / "hopper-fp8.yaml")]
    every = (-1, "all")  # as versions of compose write it
    for given, counts in (({}, every), ({"TRAINER_GPUS": "all"}, every), ({"TRAINER_GPUS": "2"}, (2,))):
        service = config(files, tmp_path, **given)["services"]["trainer"]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["count"] in counts
        assert int(service["shm_size"]) == SHARED_MEMORY_BYTES


def test_compose_understands_each_file_with_monitoring(profile: str, tmp_path: Path) -> None:
    files = ["-f", str(COMPOSE / f"{profile}.yaml"), "-f", str(COMPOSE / "monitoring.yaml")]
    usual = {"trainer", HELPER, "prometheus", "grafana", "node-exporter"}
    found = config(files, tmp_path)
    assert set(found["services"]) == usual
    assert set(config([*files, "--profile", "dcgm"], tmp_path)["services"]) == {*usual, "dcgm-exporter"}
    for mount in found["services"]["grafana"]["volumes"]:
        assert Path(mount["source"]).is_dir()
    alone = config(files[:2], tmp_path)["services"]
    assert {name: found["services"][name] for name in alone} == alone, "monitoring changes nothing of the run"
