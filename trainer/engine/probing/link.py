"""The way between GPUs of one kind: whether they read each other's memory, how fast, and what an exchange of
gradients takes.

Each GPU has a process of its own, as in a run, and all work at once. The parent imports no torch.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.engine.probing.child import Answer, Child, last_words
from trainer.engine.probing.probe import is_accident
from trainer.machine.facts import EXCHANGED_BYTES, LinkVerdict

if TYPE_CHECKING:
    import torch

    from trainer.engine.ranks import Ranks
    from trainer.modeling.storage.shared_memory import Offer

TIMEOUT_SECONDS = 90.0
COPIED_BYTES = 2**28
"""Bytes that each reads of another one at a time."""
_TIMES = 8
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
# odd numbers: every byte of a pattern depends on its place and its owner
_STEP, _OWNER = 2_654_435_761, 40_503


def probe_link(
    devices: Sequence[str], environment: Mapping[str, str], visible: str = ""
) -> tuple[bool, LinkVerdict]:
    """The verdict on the way between these devices; a crash, a hang or a wrong byte is one too, from where
    the processes have met.

    The flag is False for a failure that says nothing of the way. `visible` stands for the variables that
    chose the devices.
    """
    environ, size = {**_LOOPBACK, **environment}, len(devices)
    with tempfile.TemporaryDirectory(prefix="trainer-link-") as folder, ThreadPoolExecutor(size) as pool:
        children = [Child(environ) for _ in devices]
        asked = [
            {"link": [rank, size], "place": f"{folder}/meet", "device": device}
            for rank, device in enumerate(devices)
        ]
        try:
            waiting = [
                pool.submit(child.ask, request, TIMEOUT_SECONDS)
                for child, request in zip(children, asked, strict=True)
            ]
            answers = [one.result() for one in waiting]
        finally:  # a signal may have ended this thread's wait: the pool's threads are there still
            for child in children:
                child.kill()
    return is_settled(answers), judge(answers, visible)


def is_settled(answers: Sequence[Answer]) -> bool:
    """False where a process ended by an accident, or before it had met the others."""
    met = all(any("met" in row for row in one.rows) for one in answers)
    return met and not any(is_accident(one) for one in answers)


def judge(answers: Sequence[Answer], visible: str = "") -> LinkVerdict:
    """The verdict that follows from the answer of each process."""
    found = [dict(ChainMap(*answer.rows)) for answer in answers]
    rate = min(float(row.get("gib_per_second", 0.0)) for row in found)
    # of all, or of none: each waits for the others
    exchange = (
        max(float(row["exchange_ms"]) for row in found) if all("exchange_ms" in row for row in found) else 0.0
    )
    reason = next((str(row["trouble"]) for row in found if "trouble" in row), "")
    failed = next((answer for answer in answers if answer.code != 0), None)
    if not reason and failed is not None:
        ended = f"exit code {failed.code}" if failed.code else f"no result within {TIMEOUT_SECONDS:.0f} s"
        reason = f"the probe failed: {last_words(failed.errors) or ended}"
    works = not reason and rate > 0.0
    size = f"{COPIED_BYTES >> 20} MiB"
    copied = f"each read {size} of every other one's memory, all at once, and every byte was right"
    return LinkVerdict(
        gpus=len(answers),
        visible=visible,
        works=works,
        gib_per_second=round(rate, 1) if works else 0.0,
        exchange_ms=round(exchange, 3),
        reason=reason or copied,
    )


# from here on, in the processes that copy


def print_link(rank: int, size: int, place: Path, device: str) -> None:
    """Measure with the other processes; a line of JSON for each figure, and one for what is in the way."""
    from trainer.engine.ranks import joined
    from trainer.errors import HardwareError

    try:
        with joined(rank, size, place, device=device) as ranks:
            print(json.dumps({"met": size}), flush=True)  # what fails from here on is of the way
            ranks.connect(device)
            print(json.dumps({"exchange_ms": _exchange_ms(ranks, device)}), flush=True)
            print(json.dumps(_read_others(ranks, device)), flush=True)
    except HardwareError as error:
        print(json.dumps({"trouble": error.problems[0].what}), flush=True)


def _exchange_ms(ranks: Ranks, device: str) -> float:
    """Milliseconds in which slices of bf16 go to everybody, and sums of fp32 come back, as in a step."""
    import torch

    each = EXCHANGED_BYTES // 2 // ranks.size
    sent = torch.zeros(ranks.size, each, dtype=torch.bfloat16, device=device)
    received, own = torch.empty_like(sent), torch.zeros(each, device=device)
    gathered = torch.empty(ranks.size, each, device=device)

    def once() -> None:
        ranks.all_to_all(received, sent)
        ranks.all_gather(gathered, own)

    return _timed(once, device)


def _read_others(ranks: Ranks, device: str) -> dict[str, object]:
    """The rate at which this device reads the others' memory, the slowest one's, or what is wrong. Raises
    HardwareError where it cannot.

    One after another, at every distance, so that each pair is copied in both directions, as runs on fewer of
    these GPUs read too.
    """
    import torch

    from trainer.modeling.storage.shared_memory import share

    memory, offer = share(COPIED_BYTES, torch.device(device))
    memory.bytes.copy_(_pattern(ranks.rank, device))
    target = torch.empty_like(memory.bytes)
    if device != "cpu":
        torch.cuda.synchronize()
    offers, slowest, trouble = ranks.gathered(offer), 0.0, ""
    for distance in range(1, ranks.size):
        other = (ranks.rank + distance) % ranks.size
        milliseconds, right = _read_one(ranks, offers[other], other, target, device)
        slowest = max(slowest, milliseconds)
        if False in (all_right := ranks.gathered(right)):
            reader = all_right.index(False)
            read = (reader + distance) % ranks.size
            trouble = f"GPU {reader} read other bytes from GPU {read} than lie there"
            break
    memory.close()
    return {"trouble": trouble} if trouble else {"gib_per_second": COPIED_BYTES / 2**30 / (1e-3 * slowest)}


def _read_one(
    ranks: Ranks, offer: Offer, other: int, target: torch.Tensor, device: str
) -> tuple[float, bool]:
    """Milliseconds of a copy of another rank's memory, while all copy, and whether every byte is right."""
    import torch

    from trainer.modeling.storage.shared_memory import Memory, open_offer

    opened: list[Memory] = []
    ranks.agreed(lambda: opened.append(open_offer(offer, torch.device(device))))
    (memory,) = opened
    milliseconds = _timed(lambda: target.copy_(memory.bytes, non_blocking=True), device)
    right = bool(torch.equal(target, _pattern(other, device)))
    memory.close()
    ranks.meet()
    return milliseconds, right


def _pattern(owner: int, device: str) -> torch.Tensor:
    """Bytes that no other owner's memory holds, 1-D uint8."""
    import torch

    places = torch.arange(COPIED_BYTES // 8, device=device)
    return (places * _STEP + (owner + 1) * _OWNER).view(torch.uint8)


def _timed(work: Callable[[], object], device: str) -> float:
    """Median milliseconds of some calls, after two."""
    import torch

    times = []
    for _ in range(_TIMES + 2):
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return float(statistics.median(times[2:]))
