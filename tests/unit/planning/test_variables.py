"""Variables of the training processes: each is a row, and the user's own values stay."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from tests.unit.planning.conftest import machine
from tests.unit.planning.test_resolve import Config, on_each_kind
from trainer.cli.jobs import rank_environments
from trainer.config.schema import changed
from trainer.engine.context import Context
from trainer.engine.ranks import Ranks
from trainer.machine.facts import Facts
from trainer.planning.plan import Plan
from trainer.planning.resolve import resolve
from trainer.planning.shapes.geometry import Geometry

ORDER = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
NO_PEERS = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
OLD, NEW = (550, 40, 6), (550, 40, 7)


@pytest.fixture
def planned(config: Config, geometry: Geometry) -> Any:
    """planned(facts, environment, ...): the plan there of a run of four micro-batches a step."""

    def plan(facts: Facts, environ: dict[str, str], **changes: Any) -> Plan:
        asked = config(train__gradient_accumulation_steps=4, **changes)
        machines = on_each_kind(asked, facts, lambda changed, dtype: geometry, environ)
        return resolve(machines, functools.partial(changed, asked), offload=True)

    return plan


def gpus(name: str, count: int, **changes: Any) -> Facts:
    return dataclasses.replace(machine(name), gpus=machine(name).gpus * count, **changes)


def rows(plan: Plan) -> dict[str, tuple[str, str]]:
    """Source and reason by variable."""
    return {one.value: (one.source, one.reason) for one in plan.decisions if one.feature == "environment"}


def test_every_variable_is_a_row_and_reaches_each_rank(planned: Any) -> None:
    found = planned(gpus("h200", 2, cpu_count=16), {})
    assert dict([ORDER]).items() <= found.environment.items()
    assert found.rank_environment == {"OMP_NUM_THREADS": "8", **LOOPBACK}
    assert rows(found).keys() == {*found.environment, *found.rank_environment}
    told = {source for name, (source, _) in rows(found).items() if name != "PYTORCH_ALLOC_CONF"}
    assert told == {"auto"}
    assert rows(found)["OMP_NUM_THREADS"][1] == "8: 16 cores, shared by 2 processes"
    ranks = rank_environments(found.child_environment({"HOME": "/"}), found)
    assert len(ranks) == 2
    for rank, environ in enumerate(ranks):
        wanted = {**found.environment, **found.rank_environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        assert wanted.items() <= environ.items()


def test_ranks_on_a_cpu_share_its_cores_and_meet_by_loopback(planned: Any) -> None:
    found = planned(machine("cpu"), {}, parallel__gpus=2)
    cores = machine("cpu").cpu_count
    assert found.rank_environment == {"OMP_NUM_THREADS": str(max(1, cores // 2)), "GLOO_SOCKET_IFNAME": "lo"}
    assert ORDER[0] not in rows(found)


def test_threads_are_those_that_a_container_s_limit_lets_compute(planned: Any) -> None:
    """`docker run --cpus`, or resources.limits.cpu of a pod: more threads would only wait for each other."""
    facts = dataclasses.replace(machine("h200"), cpu_count=128, cpu_limit=7.5)
    found = planned(facts, {})
    assert found.environment["OMP_NUM_THREADS"] == "8"
    assert rows(found)["OMP_NUM_THREADS"] == ("auto", "8: 128 processors, this container's limit is 7.5")
    found = planned(dataclasses.replace(facts, gpus=facts.gpus * 2), {})
    assert found.rank_environment["OMP_NUM_THREADS"] == "4"
    assert rows(found)["OMP_NUM_THREADS"][1].startswith(
        "4: 8 cores of 128 processors, this container's limit"
    )
    assert planned(facts, {"OMP_NUM_THREADS": "3"}).environment["OMP_NUM_THREADS"] == "3"
    for limit in (128.0, 500.0):  # no limit of this machine
        assert "OMP_NUM_THREADS" not in planned(dataclasses.replace(facts, cpu_limit=limit), {}).environment


@pytest.mark.parametrize("name", ["h200", "rtx-4090"])
def test_one_process_needs_only_the_numbers_of_its_gpu(planned: Any, name: str) -> None:
    found = planned(gpus(name, 2), {}, parallel__gpus=1)
    assert found.rank_environment == {}
    assert found.environment.keys() == {"PYTORCH_ALLOC_CONF", ORDER[0]}


def test_the_users_own_values_stay_and_are_told(planned: Any) -> None:
    own = {
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
        "OMP_NUM_THREADS": "3",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": " ",  # as good as none
        "NCCL_P2P_DISABLE": "0",
    }
    found = planned(gpus("rtx-4090", 2, driver=OLD), own)
    environ = rank_environments(found.child_environment(own), found)[0]
    kept = {**own, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    assert {name: environ[name] for name in kept} == kept
    source, reason = rows(found)["GLOO_SOCKET_IFNAME"]
    assert (source, reason[:29]) == ("GLOO_SOCKET_IFNAME", "eth1, yours, in place of lo: ")
    assert rows(found)["NCCL_P2P_DISABLE"][0] == "NCCL_P2P_DISABLE"
    assert rows(found)["NCCL_IB_DISABLE"][0] == "auto"


@pytest.mark.parametrize(
    ("name", "count", "driver", "disabled"),
    [
        ("rtx-4090", 2, OLD, True),
        ("rtx-4090", 2, None, True),
        ("rtx-4090", 2, NEW, False),
        ("rtx-4090", 1, OLD, True),  # others may be hidden from the run, not from accelerate
        ("h200", 2, OLD, False),
    ],
)
def test_gpus_without_peer_access_are_told_to_accelerate_and_nccl(
    planned: Any, name: str, count: int, driver: tuple[int, ...] | None, disabled: bool
) -> None:
    found = planned(gpus(name, count, driver=driver), {})
    assert (NO_PEERS.items() <= found.environment.items()) == disabled
    assert ("NCCL_P2P_DISABLE" in rows(found)) == disabled
    if disabled:
        assert (
            "accelerate wants it for RTX 40 with a driver before 550.40.07"
            in (rows(found)["NCCL_P2P_DISABLE"][1])
        )


def test_a_card_that_is_left_out_counts_for_accelerate(planned: Any) -> None:
    facts = gpus("h200", 2, driver=OLD)
    facts = dataclasses.replace(facts, gpus=(*machine("rtx-4090").gpus, *facts.gpus))
    found = planned(facts, {})
    assert found.devices == (1, 2)
    assert NO_PEERS.items() <= found.environment.items()


def test_accelerate_accepts_what_is_set(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own rule, on the same names and drivers: where it would refuse to start, both variables are set."""
    from accelerate.utils import environment

    for name, driver in (("rtx-4090", OLD), ("rtx-4090", NEW), ("h200", OLD)):
        text = ".".join(str(number) for number in driver)
        facts = gpus(name, 2, driver=driver)
        names = [gpu.name for gpu in facts.gpus]
        monkeypatch.setattr(environment, "get_gpu_info", lambda names=names: (names, len(names)))
        monkeypatch.setattr(environment, "get_driver_version", lambda text=text: text)
        refuses = not environment.check_cuda_p2p_ib_support()
        assert (NO_PEERS.items() <= planned(facts, {}).environment.items()) == refuses


def test_each_rank_computes_on_its_place_among_the_visible_gpus(planned: Any) -> None:
    """No GPU is hidden from a rank: the plan's places are torch's numbers, and accelerate's."""
    facts = gpus("h200", 2)
    found = planned(dataclasses.replace(facts, gpus=(*machine("rtx-4090").gpus, *facts.gpus)), {})
    environments = rank_environments(found.child_environment({}), found)
    for rank, place in enumerate((1, 2)):
        context = with_only(Context, plan=found, ranks=Ranks(rank=rank, size=2))
        assert context.device == f"cuda:{place}"
        assert environments[rank]["LOCAL_RANK"] == str(place)


def with_only(kind: Any, **values: Any) -> Any:
    """A frozen value of which only these fields are of any interest."""
    return kind(**{**{field.name: None for field in dataclasses.fields(kind)}, **values})
