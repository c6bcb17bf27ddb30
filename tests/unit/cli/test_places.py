"""The place of a start: machines, a launcher's and a cluster's numbers, and `trainer plan` for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.contract.runs import CPU_FACTS, ROOT
from trainer import families
from trainer.cli import main, places
from trainer.cli.places import Place
from trainer.config.hosts import Hosts
from trainer.config.launchers import Launch
from trainer.config.reading.load import Loaded, load
from trainer.errors import ConfigError, LostError


def loaded(*overrides: str) -> Loaded:
    defaults = {name: families.get(name).defaults for name in families.names()}
    path = ROOT / "train_configs" / "quickstart.yaml"
    return load([path], overrides=overrides, family_defaults=defaults, environ={})


def test_a_clusters_number_of_processes_counts_on_each_host() -> None:
    place = Place(launch=Launch(), hosts=Hosts(count=2, each=3))
    found = place.reconciled(loaded())
    assert found.config.parallel.gpus == 6 and found.sources["parallel.gpus"] == "PET_NPROC_PER_NODE"
    assert found.hosts.count == 2
    assert place.reconciled(loaded("parallel.gpus=6")).config.parallel.gpus == 6
    with pytest.raises(ConfigError, match=r"parallel\.gpus is 3, and PET_NPROC_PER_NODE is 3 on 2 hosts"):
        place.reconciled(loaded("parallel.gpus=3"))
    assert Place(launch=Launch(), hosts=Hosts(count=2)).reconciled(loaded()).config.parallel.gpus == "auto"


def test_a_name_that_stays_unknown_is_told_and_then_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(places, "BUDGET_SECONDS", {places.Phase.LOAD: 0.7})
    monkeypatch.setattr(places, "_LOOK_SECONDS", 0.1)
    unknown = Hosts(count=2, number=1, address="no-such-host.invalid", master_source="TRAINER_MASTER")
    with pytest.raises(LostError, match=r'"no-such-host\.invalid" is not known here') as told:
        places._known(unknown)
    assert told.value.exit_code == 76  # a Job counts it as a try: the first pod may still wait for a node
    assert capsys.readouterr().err.count("waiting for it") == 1
    monkeypatch.setattr(places, "_TELL_AGAIN_SECONDS", 0.2)
    with pytest.raises(LostError):
        places._known(unknown)
    assert capsys.readouterr().err.count("waiting for it") > 1
    with pytest.raises(ConfigError, match="is not known here"):  # of its own name nobody else is to blame
        places._known(dataclasses.replace(unknown, number=0))


def test_host_0_must_have_the_address_at_which_all_meet() -> None:
    named = {"count": 2, "address": "203.0.113.7", "master_source": "TRAINER_MASTER"}
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7 is no address of this machine"):
        places._require_own(Hosts(number=0, **named), "203.0.113.7")
    places._require_own(Hosts(number=1, **named), "203.0.113.7")
    places._require_own(Hosts(number=0, **{**named, "address": "localhost"}), "127.0.0.1")


def test_a_name_of_host_0_that_is_a_loopback_address_there_reaches_nobody(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian and Ubuntu write the machine's own name beside 127.0.1.1; the others have its real address."""
    named = {"count": 2, "address": "spark-1", "master_source": "TRAINER_MASTER"}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(
        ConfigError, match=r"spark-1 is 127\.0\.1\.1 here, which only programs on this machine"
    ):
        places._require_own(Hosts(number=0, **named), "127.0.1.1")
    places._require_own(Hosts(number=1, **named), "127.0.1.1")
    places._require_own(Hosts(number=0, **{**named, "address": "127.0.1.1"}), "127.0.1.1")  # as written
    places._require_own(Hosts(number=0, **{**named, "address": "localhost"}), "127.0.0.1")
    assert capsys.readouterr().err == ""
    places._require_own(Hosts(number=0, **named), "127.0.0.1")
    assert "warning: TRAINER_MASTER: this is host 0, and spark-1 is 127.0.0.1 here" in capsys.readouterr().err
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    places._require_own(Hosts(number=0, **named), "127.0.1.1")


def test_the_plan_of_a_host_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    for name, value in (("NODES", "2"), ("NODE_RANK", "1"), ("MASTER", "127.0.0.1:7")):
        monkeypatch.setenv(f"TRAINER_{name}", value)
    words = ["plan", "train_configs/quickstart.yaml", "--facts", str(CPU_FACTS), "--output", str(tmp_path)]
    assert main([*words, "--set", "train.gradient_accumulation_steps=2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "this is host 1; all meet at 127.0.0.1:7 (TRAINER_MASTER)" in printed
    assert main([*words, "--gpus", "3"]) == 78
