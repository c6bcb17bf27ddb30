"""Blocks that lie with two GPUs: each reads the memory of the other, and computes what a whole base does."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.modeling.small_models import Storage

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("peers"),
    pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices"),
]
RANKS, BLOCKS = 2, 12
MIB = 2**20


def work(rank: int, place: Path, storage: Storage, fast: bool, recomputed: bool, answers: Any) -> None:
    """One rank: differences to a resident model, and memory."""
    from trainer.modeling.vision import make_torchvision_importable

    make_torchvision_importable()
    from tests.gpu.test_swap import made, replayed
    from tests.unit.modeling.small_models import difference, relative
    from trainer.engine.ranks import joined
    from trainer.modeling.storage.peer_blocks import PeerMemory
    from trainer.modeling.storage.shared_memory import held_bytes

    device = f"cuda:{rank}"
    torch.cuda.set_device(device)
    with joined(rank, RANKS, place, device=device) as ranks:
        ranks.connect(device)
        other = made(storage, 0, fast=fast, recomputed=recomputed)
        other.gradients()  # takes workspaces of the libraries, which stay
        torch.cuda.empty_cache()
        whole = torch.cuda.memory_allocated()

        def home(blocks: list[Any], forward_only: list[Any] | None) -> PeerMemory:
            given = {"member": rank, "size": RANKS, "agree": ranks.agreed, "device": device}
            return PeerMemory(blocks, forward_only=forward_only, **given)  # type: ignore[arg-type]

        one = made(storage, BLOCKS, fast=fast, recomputed=recomputed, home=home, closed=True)
        torch.cuda.empty_cache()
        outside = held_bytes()
        found = []
        for _ in range(3):
            (output, gradients), (wanted_output, wanted) = one.gradients(), other.gradients()
            found.append((relative(output, wanted_output), difference(gradients, wanted)))
        staged = one.model.single_transformer_blocks[1 - rank % 2].staged
        staged.empty()
        torch.cuda.synchronize()
        inside = torch.cuda.memory_allocated() - whole
        graphed = replayed(one, staged) if fast else ([0.0], [0.0])
        answers.put((rank, found, graphed, whole, inside, outside, staged.home_bytes))
        ranks.meet()


def answers_of(processes: list[Any], answers: Any) -> list[Any]:
    """One answer of each process. A failed one ends the others, which would wait for it; its traceback is in
    the test's stderr.
    """
    found: list[Any] = []
    try:
        while len(found) < len(processes):
            failed = [process.exitcode for process in processes if process.exitcode]
            assert not failed, f"exit codes of ranks: {failed}"
            with contextlib.suppress(queue.Empty):
                found.append(answers.get(timeout=1))
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("recomputed", [True, False])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("storage", ["plain", "int8", "nf4"])
def test_blocks_of_the_other_gpu_are_read_as_they_are(
    storage: Storage, fast: bool, recomputed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the allocator's expandable segments, as profiles set them. No rank holds the other's blocks."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    given = [(rank, tmp_path / "meet", storage, fast, recomputed, answers) for rank in range(RANKS)]
    processes = [context.Process(target=work, args=one) for one in given]
    for process in processes:
        process.start()
    found = answers_of(processes, answers)
    for rank, differences, (losses, sums), whole, inside, outside, others in found:
        assert all(output < (1e-2 if fast else 1e-6) for output, _ in differences), (rank, differences)
        assert all(gradient < (1e-2 if fast else 1e-3) for _, gradient in differences), (rank, differences)
        assert all(loss < 1e-5 for loss in losses) and all(total < 1e-3 for total in sums), (losses, sums)
        assert outside > 0 and others > 0
        # the second model's own blocks lie outside torch's memory, and the other rank's nowhere here
        assert inside < whole - outside - others + 16 * MIB, (rank, whole, inside, outside, others)
