"""The loading and saving benchmarks run, count what they read, and judge by the numbers they print."""

from __future__ import annotations

import json
import mmap
import time
from pathlib import Path

import pytest

from bench import load, save
from bench.load import Measured
from trainer.errors import HardwareError

ON_CPU = ["--gib", "0.01", "--device", "cpu"]


def lines(printed: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def test_every_variant_is_measured_in_both_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "in_child", load.measure)
    load.main([*ON_CPU, "--folder", str(tmp_path), "--files", "2", "--rings", "1x4x2"])
    printed = capsys.readouterr().out
    found = lines(printed)
    variants = [*load.VARIANTS, "direct@1x4x2", "buffered@1x4x2"]
    assert [(row["variant"], row["state"]) for row in found] == [
        (variant, state) for state in load.STATES for variant in variants
    ]
    assert all(row["gib_per_second"] > 0 for row in found)
    assert all(any(line.startswith(f"{variant} ") for line in printed.splitlines()) for variant in variants)
    assert "no verdict without a GPU" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_variant_is_measured_in_its_own_process(tmp_path: Path) -> None:
    paths = load.write_files(tmp_path, 0.01, 2)
    assert sum(path.stat().st_size for path in paths) == pytest.approx(0.01 * 2**30, rel=0.1)
    written = [path.stat().st_mtime_ns for path in paths]
    assert load.write_files(tmp_path, 0.01, 2) == paths
    assert [path.stat().st_mtime_ns for path in paths] == written
    measured = load.in_child("direct", "cold", paths, "cpu")
    assert measured.how == "parallel reads past the page cache (bench)"
    # the ring of 256 MiB is filled as far as there are bytes; so short a read may fall between two looks
    assert measured.host_growth_mib < 300


def test_a_device_that_is_not_there_is_told(tmp_path: Path) -> None:
    paths = load.write_files(tmp_path, 0.001, 1)
    with pytest.raises(HardwareError, match="direct could not read to cuda:99"):
        load.in_child("direct", "cold", paths, "cuda:99")


def test_memory_that_is_let_go_again_is_counted() -> None:
    with load.host_memory() as growth:
        memory = mmap.mmap(-1, 64 * 2**20)
        for offset in range(0, len(memory), mmap.PAGESIZE):
            memory[offset] = 1
        while growth["bytes"] < 60 * 2**20:
            time.sleep(0.005)
        memory.close()
    assert growth["bytes"] < 120 * 2**20


def measured(variant: str, state: str, rate: float, growth: float = 100.0) -> Measured:
    return Measured(
        variant=variant,
        state=state,
        gib_per_second=rate,
        seconds=1.0,
        host_growth_mib=growth,
        device_peak_gib=0.0,
        how="",
    )


def test_the_verdict_names_what_is_missed() -> None:
    found = [
        measured("raw-direct", "cold", 5.0),
        measured("raw-buffered", "cold", 4.0),
        measured("safetensors", "cold", 2.0),
        measured("safetensors", "cached", 7.5),
        measured("auto", "cold", 4.0, growth=300.0),
        measured("auto", "cached", 15.0, growth=1500.0),
    ]
    rows = load.verdict(found).splitlines()
    assert rows[0] == "ok   cold against safetensors: 2.00, needed 1.7"
    assert rows[1] == "MISS cold against the raw reads: 0.80, needed 0.9"
    assert rows[2] == "ok   cached against safetensors: 2.00, needed 1.0"
    assert rows[3] == "MISS host memory: +1500 MiB, allowed 1024"
    assert load.verdict(found[2:]).startswith("no verdict")


def test_saving_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept.txt").write_text("not the benchmark's")
    save.main(["--folder", str(tmp_path), "--tensors", "4", "--repeats", "2", "--device", "cpu"])
    (row,) = lines(capsys.readouterr().out)
    assert row["tensors"] == 4
    assert row["mib"] == pytest.approx(4 * 3 * 16 * 3072 * 4 / 2**20, abs=0.1)
    assert all(row[name] > 0 for name in ("save_seconds", "check_seconds", "read_seconds"))
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_the_kernel_forgets_files_where_it_may_be_asked_to(tmp_path: Path) -> None:
    setting = tmp_path / "drop_caches"
    load.drop_page_cache(setting)
    assert not setting.exists()
    setting.write_text("")
    load.drop_page_cache(setting)
    assert setting.read_text() == "1"
