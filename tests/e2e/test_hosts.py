"""Runs of several hosts: the bits of one, one end for all, and what each says when another one is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.runs import LORA_CASES, Case, different, files, numbers, products
from tests.e2e.conftest import Process, Start
from tests.e2e.hosts import start_hosts
from tests.e2e.test_ranks import ended

FIRST = LORA_CASES[0]


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
    print(printed)
    print(other)
