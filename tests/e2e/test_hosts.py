"""Runs of several hosts: the bits of one, one end for all, and what each says when another one is lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import LORA_CASES, Case, different, files, numbers, products, steps_saved
from tests.e2e.conftest import Process, Start
from tests.e2e.hosts import start_hosts
from tests.e2e.test_interruptions import require_equal
from tests.e2e.test_ranks import MOMENTS, TWO, ended
from tests.e2e.test_rows import FULL, SURE, require_as_one
from trainer.errors import ExitCode
from trainer.telemetry.status import Phase

FIRST = LORA_CASES[0]


def read_plan(run_dir: Path) -> Any:
    return json.loads((run_dir / "plan.json").read_text())


@pytest.mark.slow
def test_two_hosts_give_the_bits_of_one(
    start: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    first, second = start_hosts(start, FIRST, tmp_path)
    printed = ended(first)
    other = ended(second)
    straight = uninterrupted(FIRST)
    assert numbers(first.run_dir) == numbers(straight.run_dir)
    assert products(first.run_dir)
    assert not different(products(first.run_dir), products(straight.run_dir))
    kept = "checkpoints/*/*"
    assert not different(files(first.run_dir, kept), files(straight.run_dir, kept))
    assert printed.count("Proved: ") == 1 and "Proved" not in other
    assert "rank 1: the run is finished; what it made is on host 0" in other
    (row,) = [one for one in read_plan(first.run_dir)["decisions"] if one["feature"] == "link"]
    assert row["value"].endswith(" GB/s") and "32 MiB between 2 hosts, by lo" in row["reason"]
    assert ("name the fast interface" in row["reason"]) == (float(row["value"].split()[0]) < 2)
    assert f"link: {row['value']}; " in printed
    assert not [path for one in (first, second) for path in one.runtime.glob("train-*")]


FOUR = ("train.train_batch_size=1", "train.gradient_accumulation_steps=4", "validation.prompts=[]")


@pytest.mark.slow
def test_two_ranks_on_each_of_two_hosts_share_a_base_and_give_the_bits_of_one(
    fork_ranks: Start, tmp_path: Path
) -> None:
    """Blocks lie with the ranks of one host in turn, and shards of files are read once a host."""
    straight = fork_ranks(FIRST, tmp_path / "straight", *FOUR)
    ended(straight)
    shared = ("parallel.gpus=4", "parallel.shard=full", "checkpoint.checkpointing_steps=1000")
    both = start_hosts(fork_ranks, FIRST, tmp_path, *FOUR, *shared)
    printed, other = " ".join(ended(both[0]).split()), ended(both[1])
    assert "blocks over 2" in printed and "blocks lie with 2 ranks in turn" in printed
    assert "2 on each of 2 hosts" in printed and "rank 3" not in other
    assert numbers(both[0].run_dir) == numbers(straight.run_dir)
    assert not different(products(both[0].run_dir), products(straight.run_dir))


@pytest.mark.slow
def test_a_full_fine_tune_lies_in_rows_over_two_hosts(fork_ranks: Start, tmp_path: Path) -> None:
    """In a folder that both see; stopped by one host, and gone on with. Refused where each has its own."""
    sure = (SURE, "validation.every_steps=1000")
    straight = fork_ranks(FULL, tmp_path / "straight", *sure)
    ended(straight)
    two = (TWO, *sure)
    late = "checkpoint.checkpointing_steps=1000"
    apart = start_hosts(fork_ranks, FULL, tmp_path / "apart", *two, apart=True)
    for process in apart:
        code, errors = process.end()
        assert code == ExitCode.BAD_CONFIG, errors
        assert "host 1 does not see the folder of host 0" in errors
    both = start_hosts(fork_ranks, FULL, tmp_path, *two, late, knobs={1: {"patch": "rank"}})
    both[1].wait_for_phase(Phase.TRAIN, step=2)
    both[1].popen.send_signal(signal.SIGTERM)
    for process in both:
        code, errors = process.end()
        assert code == ExitCode.STOPPED, errors
    (saved,) = steps_saved(both[0].run_dir)
    again = start_hosts(fork_ranks, FULL, tmp_path, *two)
    printed, _ = ended(again[0]), ended(again[1])
    assert f"resumed from {saved}" in printed and "rows over 2" in " ".join(printed.split())
    require_as_one(again[0], straight)


@pytest.mark.slow
def test_hosts_with_folders_of_their_own_stop_together_and_go_on_on_one_and_on_two(
    fork_ranks: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    """SIGTERM to the second host alone; its checkpoint, its cache and its last previews need host 0's."""
    late = "checkpoint.checkpointing_steps=1000"
    slow = {1: {"patch": "rank"}}
    both = start_hosts(fork_ranks, FIRST, tmp_path, late, apart=True, knobs=slow)
    both[1].wait_for_phase(Phase.TRAIN, step=2)
    both[1].popen.send_signal(signal.SIGTERM)
    for number, process in enumerate(both):
        code, errors = process.end()
        assert code == ExitCode.STOPPED, errors
        assert errors.count("stopped on request") == 1, errors
        assert "Traceback" not in errors
        status = process.status()
        assert status is not None and status.exit_code == ExitCode.STOPPED
        assert len(list(process.cache.rglob("*.safetensors"))) == 17, number
    (saved,) = steps_saved(both[0].run_dir)
    assert not steps_saved(both[1].run_dir)

    again = start_hosts(fork_ranks, FIRST, tmp_path, apart=True)
    printed, other = ended(again[0]), ended(again[1])
    assert f"resumed from {saved}" in printed
    assert f"{saved}: " in other and "came from host 0" in other
    require_equal(again[0].run_dir, uninterrupted(FIRST).run_dir)
    assert steps_saved(again[1].run_dir) == [saved]
    assert not (again[1].run_dir / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("every", "held_out"), [(1, 1), (2, 1), (50, 1), (50, 0)])
def test_a_loss_that_is_not_finite_ends_all_hosts_with_its_code(
    every: int, held_out: int, fork_ranks: Start, tmp_path: Path
) -> None:
    """Seen by rank 0 alone where that writes a line, else by all of them in the next step: also after a round
    of validation for which nothing is held out.
    """
    rounds = ("validation.every_steps=1", f"validation.held_out={held_out}")
    words = ("lora.alpha=1e30", f"train.log_every_steps={every}", *(() if held_out else rounds), TWO)
    both = start_hosts(fork_ranks, FIRST, tmp_path, *words)
    for process in both:
        code, errors = process.end()
        assert code == ExitCode.DIVERGED, errors
        assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_of_one_host_before_training_is_a_stop_of_all(
    asked: int, fork_ranks: Start, tmp_path: Path
) -> None:
    """While both encode, each what the other one waits for."""
    slow, is_there = MOMENTS["cache"]
    knobs = {host: {"patch": slow} for host in (0, 1)}
    both = start_hosts(fork_ranks, FIRST, tmp_path, knobs=knobs, cache=tmp_path / "cache")
    both[0].wait_until(lambda: (found := both[0].status()) is not None and is_there(found))
    both[asked].popen.send_signal(signal.SIGTERM)
    words = ["stopped on request", f"host {asked} was asked to stop"]
    for host, process in enumerate(both):
        code, errors = process.end()
        assert code == ExitCode.STOPPED, errors
        assert words[host != asked] in errors and "Traceback" not in errors
        status = process.status()
        assert status is not None and status.exit_code == ExitCode.STOPPED
