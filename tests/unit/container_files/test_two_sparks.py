"""compose/two-sparks.yaml: as data, and as compose puts it over dgx-spark.yaml."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tests.unit.container_files.compose_files import COMPOSE, config, load
from tests.unit.container_files.test_compose import assert_confined
from trainer.container import appliance
from trainer.engine import ranks
from trainer.engine.hosts import link

FILE = "two-sparks.yaml"
PLACE = {"TRAINER_NODE_RANK": "1", "TRAINER_MASTER": "192.168.100.10:29400"}


def test_only_the_run_changes_and_takes_no_more_than_it_says() -> None:
    (service,) = load(FILE)["services"].values()
    assert service.keys() == {"network_mode", "environment", "ports", "ulimits", "devices"}
    assert service["ulimits"] == {"memlock": -1}
    assert service["devices"] == ["/dev/infiniband:/dev/infiniband"]
    assert service["environment"]["TRAINER_NODES"] == "2"
    for name in PLACE:
        assert service["environment"][name].startswith(f"${{{name}:?"), "a guess would train two runs"


def test_the_port_of_metrics_stays_on_the_machine() -> None:
    """In the machine's network the image's own address would be every interface."""
    assert appliance.IMAGE_ENVIRONMENT["TRAINER_METRICS_ADDRESS"] == "::"
    (service,) = load(FILE)["services"].values()
    assert service["environment"]["TRAINER_METRICS_ADDRESS"] == "127.0.0.1"
    assert service["ports"] is None


def test_what_the_run_tells_people_to_set_is_handed_in() -> None:
    """A slow link and GPUs that do not connect: the variables that their messages name."""
    (service,) = load(FILE)["services"].values()
    named = set(
        re.findall(r"\b(?:NCCL|GLOO)_[A-Z0-9_]+", f"{inspect.getsource(link)} {inspect.getsource(ranks)}")
    )
    handed_in = {*service["environment"], *appliance.HANDED_IN}
    assert {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG"} <= named <= handed_in


def test_it_says_that_nobody_ran_it() -> None:
    text = " ".join(re.sub(r"^#", "", (COMPOSE / FILE).read_text(), flags=re.MULTILINE).split())
    assert "Nobody ran this here." in text


def test_compose_puts_it_over_the_sparks_file(tmp_path: Path) -> None:
    files = ["-f", str(COMPOSE / "dgx-spark.yaml"), "-f", str(COMPOSE / FILE)]
    found = config(files, tmp_path, **PLACE, NCCL_SOCKET_IFNAME="enp1s0f0np0")["services"]["trainer"]
    alone = config(files[:2], tmp_path)["services"]["trainer"]
    place = {name: found["environment"][name] for name in (*PLACE, "TRAINER_NODES", "NCCL_SOCKET_IFNAME")}
    assert place == {**PLACE, "TRAINER_NODES": "2", "NCCL_SOCKET_IFNAME": "enp1s0f0np0"}
    assert found["environment"]["TRAINER_PROFILE"] == "dgx-spark"
    assert "ports" not in found and "networks" not in found
    assert (found["network_mode"], found["ulimits"]) == ("host", {"memlock": -1})
    (device,) = found["devices"]
    assert (device["source"], device["target"]) == ("/dev/infiniband", "/dev/infiniband")
    changed = {"environment", "ports", "networks", "network_mode", "ulimits", "devices"}
    kept = {key: value for key, value in found.items() if key not in changed}
    assert kept == {key: value for key, value in alone.items() if key not in changed}
    assert_confined({key: value for key, value in found.items() if key not in ("network_mode", "devices")})


def test_without_a_number_it_does_not_start(tmp_path: Path) -> None:
    files = ["-f", str(COMPOSE / "dgx-spark.yaml"), "-f", str(COMPOSE / FILE)]
    with pytest.raises(AssertionError, match="is this Spark 0 or 1"):
        config(files, tmp_path, TRAINER_MASTER=PLACE["TRAINER_MASTER"])
