"""Both loaders read a model's own file, from disk and from the page cache, and what was read is counted."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer.config import environment
from trainer.engine.probing import reading as probe_reading
from trainer.modeling.base import reading
from trainer.modeling.base.reading import choose
from trainer.planning.choose.loading import STATES

LOADERS = ("parallel", "fastsafetensors")


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shard") / "model.safetensors"
    save_file({f"blocks.{number:02}": torch.randn(2**16) for number in range(16)}, path)
    return path


def test_every_loader_in_every_state(shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probe_reading.print_rates(shard, "cpu")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row["gib_per_second"] > 0 for row in rows)
    found = [(row["loader"], row["state"]) for row in rows]
    # a file system in memory has no cold files
    assert [one for one in found if one[1] == "cached"] == [(loader, "cached") for loader in LOADERS]
    assert [one for one in found if one[1] == "cold"] in ([], [(loader, "cold") for loader in LOADERS])


@pytest.mark.parametrize("loader", LOADERS)
def test_only_so_much_is_read(shard: Path, loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    plain = reading.Shard

    def counted(
        *,
        ends: Mapping[str, int],
        get_tensor: Callable[[str], torch.Tensor],
        zeros: Callable[[str], torch.Tensor],
    ) -> reading.Shard:
        def asking(name: str) -> torch.Tensor:
            asked.append(name)
            return get_tensor(name)

        return plain(ends=ends, get_tensor=asking, zeros=zeros)

    monkeypatch.setattr(reading, "Shard", counted)
    assert probe_reading.measure(shard, loader, "cached", "cpu", most=4 * 2**18 + 8192) > 0
    assert asked == ["blocks.00", *(f"blocks.{number:02}" for number in range(4))]


def test_a_process_that_fails_says_why_and_keeps_nobody_waiting(shard: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("it would work")
    found, trouble = probe_reading.probe_reading(shard, "ext4 /", environment.snapshot())
    assert found == ()
    assert trouble


def test_a_slow_disk_keeps_what_was_measured(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class TooSlow:
        """Has printed one row, and a part of the next, when its time is over."""

        def __init__(self, command: list[str], **_: object) -> None:
            self.killed = False

        def kill(self) -> None:
            self.killed = True

        def communicate(self, request: str | None = None, timeout: float | None = None) -> tuple[str, str]:
            if not self.killed:
                raise subprocess.TimeoutExpired("reading", 1.0)
            row = json.dumps({"loader": "parallel", "state": "cold", "gib_per_second": 0.02})
            return f'{row}\n{{"loader": "fast', ""

    monkeypatch.setattr(subprocess, "Popen", TooSlow)
    found, trouble = probe_reading.probe_reading(shard, "nfs4 /", environment.snapshot())
    rates = {(row.loader, row.state): row.gib_per_second for row in found}
    assert rates == {(loader, state): 0.0 for loader in LOADERS for state in STATES} | {
        ("parallel", "cold"): 0.02
    }
    assert "within" in trouble
    assert {row.disk for row in found} == {"nfs4 /"}


def test_small_files_are_not_measured(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe_reading.largest(()) is None
    assert probe_reading.largest((shard,)) is None
    monkeypatch.setattr(probe_reading, "LEAST_BYTES", 2**20)
    assert probe_reading.largest((shard,)) == shard


@pytest.mark.parametrize(
    ("loader", "share", "method"),
    [
        ("fastsafetensors-cold", 0.1, "fastsafetensors"),
        ("fastsafetensors-cold", 0.9, "parallel"),
        ("fastsafetensors-cached", 0.1, "parallel"),
        ("fastsafetensors-cached", 0.9, "fastsafetensors"),
        ("fastsafetensors-cached", None, "parallel"),
        ("auto", 0.9, "parallel"),
    ],
)
def test_a_file_is_read_as_it_was_measured_in_its_state(
    shard: Path, monkeypatch: pytest.MonkeyPatch, loader: str, share: float | None, method: str
) -> None:
    monkeypatch.setattr(reading, "page_cache_share", lambda path: share)
    assert choose(shard, loader, torch.device("cuda")).method == method
