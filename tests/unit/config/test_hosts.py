"""Variables that name the machines of a run: ours, a cluster's, and what is wrong with them."""

from __future__ import annotations

import pytest

from trainer.config.hosts import DEFAULT_PORT, ONE, found
from trainer.errors import ConfigError

OURS = {"TRAINER_NODES": "2", "TRAINER_NODE_RANK": "1", "TRAINER_MASTER": "host0"}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "cats-node-0-0.cats",
    "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "auto",
}
SLURM = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}


@pytest.mark.parametrize("environ", [{}, SLURM, {"PET_NPROC_PER_NODE": "4"}, {"TRAINER_NODES": ""}])
def test_variables_of_others_start_nothing(environ: dict[str, str]) -> None:
    assert found(environ) == ONE


@pytest.mark.parametrize(
    ("master", "address", "port"),
    [
        ("host0", "host0", DEFAULT_PORT),
        ("host0.cats.svc:1234", "host0.cats.svc", 1234),
        ("10.0.0.1:29401", "10.0.0.1", 29401),
        ("fd00::2", "fd00::2", DEFAULT_PORT),
        ("[fd00::2]:7", "fd00::2", 7),
        (" host0 ", "host0", DEFAULT_PORT),
    ],
)
def test_the_place_of_a_host_and_where_they_meet(master: str, address: str, port: int) -> None:
    hosts = found({**OURS, "TRAINER_MASTER": master})
    assert (hosts.count, hosts.number, hosts.address, hosts.port) == (2, 1, address, port)
    assert (hosts.source, hosts.master_source, hosts.several) == ("TRAINER_NODES", "TRAINER_MASTER", True)


def test_the_meeting_can_be_written_as_it_is_told() -> None:
    for text in ("host0:29400", "[fd00::2]:7"):
        hosts = found({**OURS, "TRAINER_MASTER": text})
        assert hosts.meeting == text == found({**OURS, "TRAINER_MASTER": hosts.meeting}).meeting


def test_a_clusters_variables_say_the_same() -> None:
    hosts = found(KUBEFLOW)
    assert (hosts.count, hosts.number, hosts.address, hosts.port) == (2, 1, "cats-node-0-0.cats", 29400)
    assert (hosts.source, hosts.master_source, hosts.each) == ("PET_NNODES", "PET_MASTER_ADDR", None)
    same = {"TRAINER_NODES": "2", "TRAINER_NODE_RANK": "1", "TRAINER_MASTER": "cats-node-0-0.cats:29400"}
    assert found({**KUBEFLOW, **same}).number == 1
    assert found({**KUBEFLOW, "PET_NPROC_PER_NODE": "4"}).each == 4
    one = found({**KUBEFLOW, "PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"})
    assert not one.several and one.each == 2


@pytest.mark.parametrize(
    ("environ", "where", "words"),
    [
        ({"TRAINER_NODES": "2"}, "TRAINER_NODES", "TRAINER_NODE_RANK does not say which this one is"),
        ({**OURS, "TRAINER_MASTER": ""}, "TRAINER_NODES", "TRAINER_MASTER does not say where they meet"),
        ({"TRAINER_MASTER": "host0"}, "TRAINER_MASTER", "TRAINER_NODES is not"),
        ({"PET_NODE_RANK": "1"}, "PET_NODE_RANK", "PET_NNODES is not"),
        ({**OURS, "TRAINER_NODE_RANK": "2"}, "TRAINER_NODE_RANK", '"2" is not a number from 0 to 1'),
        ({**OURS, "TRAINER_NODE_RANK": "-1"}, "TRAINER_NODE_RANK", '"-1" is not a number'),
        ({**OURS, "TRAINER_NODES": "1"}, "TRAINER_NODE_RANK", '"1" is not a number from 0 to 0'),
        ({**OURS, "TRAINER_NODES": "two"}, "TRAINER_NODES", '"two" is not a number'),
        ({**KUBEFLOW, "PET_NNODES": "1:2"}, "PET_NNODES", '"1:2" is not a number'),
        ({**OURS, "TRAINER_MASTER": "host 0"}, "TRAINER_MASTER", "is not the address of a host"),
        ({**OURS, "TRAINER_MASTER": "http://host0"}, "TRAINER_MASTER", "is not a number from 1 to 65535"),
        ({**OURS, "TRAINER_MASTER": "host0:65536"}, "TRAINER_MASTER", '"65536" is not a number'),
        ({**KUBEFLOW, "PET_MASTER_ADDR": "host0:1"}, "PET_MASTER_ADDR", "has a port"),
        ({**KUBEFLOW, "PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE", '"many" is not a number'),
        ({**KUBEFLOW, **OURS}, "TRAINER_MASTER", "and PET_MASTER_ADDR is cats-node-0-0.cats"),
        ({**KUBEFLOW, "TRAINER_NODES": "3"}, "TRAINER_NODES", "TRAINER_NODES is 3, and PET_NNODES is 2"),
        ({**KUBEFLOW, "TRAINER_NODE_RANK": "0"}, "TRAINER_NODE_RANK", "PET_NODE_RANK is 1"),
        ({**OURS, "TRAINER_MASTER": "host0:1", "PET_MASTER_PORT": "2"}, "TRAINER_MASTER", "MASTER_PORT is 2"),
    ],
)
def test_what_is_wrong_is_told_with_its_variable(environ: dict[str, str], where: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        found(environ)
    (problem,) = raised.value.problems
    assert problem.where == where and words in problem.what and problem.remedy


def test_a_launcher_and_several_hosts_do_not_meet() -> None:
    assert found(KUBEFLOW, launched=True) == ONE  # torchrun reads these itself
    with pytest.raises(ConfigError, match="a launcher started this process"):
        found(OURS, launched=True)
    assert not found({"TRAINER_NODES": "1"}, launched=True).several
