"""Plans of a run over several hosts: how many processes each has, what is refused, and their variables."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.golden.plans import MACHINES, ROOT, load_shipped
from trainer.config.hosts import Hosts
from trainer.config.reading.load import with_settings
from trainer.engine.spec import Spec
from trainer.errors import ConfigError, HardwareError
from trainer.files import codec
from trainer.machine.reading import read_recorded
from trainer.planning.plan import Plan
from trainer.planning.planning import may_be_planned, plan_run

TWO = Hosts(count=2, address="127.0.0.1", source="TRAINER_NODES", master_source="TRAINER_MASTER")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def planned(
    machine: str = "several/h200-x2", hosts: Hosts = TWO, config: str = "flux1_dev_lora", **settings: object
) -> Plan:
    """The plan of FLUX.1-dev's LoRA, four images a step, where each host has such GPUs."""
    loaded = load_shipped(Path(f"train_configs/{config}.yaml"))
    names = {name.replace("__", "."): value for name, value in settings.items()}
    loaded = dataclasses.replace(with_settings(loaded, names), hosts=hosts)
    return plan_run(loaded, read_recorded(MACHINES / f"{machine}.json"), find_model=lambda _: None)


def rows(plan: Plan) -> dict[str, tuple[str, str, str]]:
    return {
        row.value if row.feature == "environment" else row.feature: (row.value, row.source, row.reason)
        for row in plan.decisions
    }


def test_auto_counts_over_all_hosts() -> None:
    plan = planned()
    assert (plan.ranks, plan.hosts, plan.ranks_here, plan.devices) == (4, 2, 2, (0, 1))
    table = rows(plan)
    assert table["gpus"][0] == "2 of 2 on each of 2 hosts"
    assert table["hosts"][:2] == ("2", "TRAINER_NODES") and "127.0.0.1:29400" in table["hosts"][2]
    alone = planned(hosts=Hosts())
    assert (alone.ranks, alone.hosts) == (2, 1) and "hosts" not in rows(alone)
    # what a host keeps and shares is by its own processes
    assert plan.host_memory == alone.host_memory
    assert plan.rank_environment["OMP_NUM_THREADS"] == alone.rank_environment["OMP_NUM_THREADS"]


def test_a_step_that_fewer_share_is_shared_by_fewer() -> None:
    plan = planned(train__gradient_accumulation_steps=2)
    assert (plan.ranks, plan.ranks_here, plan.devices) == (2, 1, (0,))
    four = Hosts(**{**vars(TWO), "count": 4})
    assert planned(hosts=four).ranks_here == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parallel__gpus": 3}, "3 do not lie on 2 hosts"),
        (
            {"train__gradient_accumulation_steps": 3},
            "the 3 micro-batches of a step are not shared evenly by 2",
        ),
        (
            {"train__gradient_accumulation_steps": 1},
            "the 1 micro-batches of a step are not shared evenly by 2",
        ),
        (
            {"parallel__gpus": 6, "train__gradient_accumulation_steps": 6},
            "visible are 2 .* on each of 2 hosts",
        ),
    ],
)
def test_what_hosts_cannot_share_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises((ConfigError, HardwareError), match=words):
        planned(**settings)


def test_the_interface_is_that_of_the_route_and_nccl_speaks_last() -> None:
    names = planned().rank_environment
    assert (names["GLOO_SOCKET_IFNAME"], names["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert int(names["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) >= 2 * 60 * 60
    unknown = planned(hosts=dataclasses.replace(TWO, address="no-such-host.invalid")).rank_environment
    assert "GLOO_SOCKET_IFNAME" not in unknown
    assert "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC" not in planned(hosts=Hosts()).rank_environment


def test_a_full_fine_tune_lies_in_rows_over_all_and_a_base_inside_a_host() -> None:
    shared = planned(parallel__shard="full")
    assert (shared.ranks, shared.shard_group) == (4, 2)


def test_no_way_between_hosts_is_taken_for_that_between_gpus() -> None:
    """Verdicts on the way between one host's GPUs say nothing of the network."""
    lora, alone = (rows(planned(hosts=hosts))["exchange"] for hosts in (TWO, Hosts()))
    assert alone[1] == "auto (measured)" and " ms" in alone[2]
    assert lora[1] == "auto" and " ms" not in lora[2] and "once they have met" in lora[2]
    full = planned(config="flux1_dev_full", train__gradient_accumulation_steps=4, parallel__gpus=4)
    assert full.in_rows
    for name in ("exchange", "step_time"):
        assert "no time is counted for what travels" in rows(full)[name][2]


def test_a_run_over_hosts_has_advice_where_memory_runs_out(tmp_path: Path) -> None:
    """Planned as if this host were alone, four GPUs are more than it has, and all advice is refused."""
    settings = {"train.gradient_accumulation_steps": 4, "parallel.gpus": 4, "output_dir": tmp_path}
    loaded = with_settings(load_shipped(Path("train_configs/flux1_dev_lora.yaml")), settings)
    facts = read_recorded(MACHINES / "several/h200-x2.json")
    job = Spec(
        mode="train",
        config={},
        plan_text="",
        runtime_dir="",
        cache_dir="",
        meeting_place="",
        hosts=2,
        master="host0",
    )
    wanted = {"features.activation_checkpointing": True}
    assert may_be_planned(loaded.config, wanted, facts, hosts=job.machines)
    assert not may_be_planned(loaded.config, wanted, facts)


def test_advice_is_tried_with_what_the_run_keeps(tmp_path: Path) -> None:
    """The next start takes the weights of the first, with which the smaller budget has to do."""
    loaded = with_settings(
        load_shipped(Path("train_configs/flux1_dev_lora.yaml")),
        {"output_dir": tmp_path, "features.block_swap": 0},
    )
    facts, smaller = read_recorded(MACHINES / "h200.json"), {"features.memory_budget": "12GiB"}
    assert may_be_planned(loaded.config, smaller, facts)
    (tmp_path / "checkpoints/step-000010").mkdir(parents=True)
    began = plan_run(loaded, facts, find_model=lambda _: None)
    (tmp_path / "plan.json").write_text(
        codec.to_json(dataclasses.replace(began, weights="bf16", compute="bf16"))
    )
    assert not may_be_planned(loaded.config, smaller, facts)
