"""`trainer` with a supervisor whose limits a test shrinks, and a training process that is patched.

    python -m tests.e2e.harness '{"limits": {...}, "meminfo": "...", "patch": "save"}' train CONFIG...

The knobs exist only here: the trainer has no options for them.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TENSOR_SECONDS = 0.05
ENTRY_SECONDS = 0.2
RANK_SECONDS, FAR_SECONDS = 0.3, 1.0
PREVIEW_SECONDS = 0.3
IMAGE_SECONDS = 3.0
CALLS: list[str] = []
"""Collectives that this process was part of."""


def parent(knobs: dict[str, Any], arguments: Sequence[str]) -> int:
    """The command line, with its supervisor's arguments changed as `knobs` say."""
    from trainer.cli import main
    from trainer.telemetry.supervising import supervisor

    real, real_one = supervisor.supervise, supervisor.supervise_one

    def patched(command: Sequence[str]) -> Sequence[str]:
        if "patch" not in knobs:
            return command
        return [sys.executable, "-m", "tests.e2e.harness", "--child", knobs["patch"], command[-1]]

    def supervise_one(command: Sequence[str], *, environment: Mapping[str, str], **rest: Any) -> int:
        path = {"PYTHONPATH": str(ROOT)} if "patch" in knobs else {}
        limits = supervisor.Limits(**knobs.get("limits", {}))
        return real_one(patched(command), environment={**environment, **path}, **rest, limits=limits)

    def supervise(command: Sequence[str], **rest: Any) -> int:
        command = patched(command)
        if "patch" in knobs:
            # the trainer's own child imports nothing from the working directory, where `tests` is
            rest["environments"] = [{**one, "PYTHONPATH": str(ROOT)} for one in rest["environments"]]
        if "meminfo" in knobs:
            rest |= {"unified_memory": True, "meminfo_path": Path(knobs["meminfo"])}
        return real(command, **rest, limits=supervisor.Limits(**knobs.get("limits", {})))

    supervisor.supervise, supervisor.supervise_one = supervise, supervise_one
    return main(list(arguments))


def slow_save() -> None:
    """A checkpoint that takes long between its tensors."""
    from trainer.engine.records import checkpoint

    _slow_tensors(checkpoint, "write_files")


def slow_second_save() -> None:
    """A checkpoint that takes long between its tensors, where one was written before it."""
    from trainer.engine.records import checkpoint

    real = checkpoint.write_files

    def first(*given: Any) -> Any:
        checkpoint.write_files = real
        _slow_tensors(checkpoint, "write_files")
        return real(*given)

    checkpoint.write_files = first


def slow_export() -> None:
    """Final files that take long: those of a LoRA, its twin aside, and those of a model."""
    from trainer.engine.results import full, proof
    from trainer.modeling import tensor_file

    real = proof.rewrite_sorted

    def rewrite(path: Path, metadata: Mapping[str, str]) -> None:
        if path.parent.name == "lora.tmp":  # checkpoints have such files too
            _slow_tensors(tensor_file, "write_tensors")
        real(path, metadata)

    proof.rewrite_sorted = rewrite
    _slow_tensors(full, "write_files")


def slow_twin() -> None:
    """A file for ComfyUI that takes long between its tensors."""
    from trainer.modeling.adapter import comfyui

    _slow_tensors(comfyui, "write_tensors")


def _slow_tensors(module: Any, name: str) -> None:
    """Whatever of the module writes tensors, and is given last what runs after each."""
    real = vars(module)[name]

    def write(*given: Any) -> Any:
        *what, on_tensor = given

        def later() -> None:
            time.sleep(TENSOR_SECONDS)
            if on_tensor is not None:
                on_tensor()

        return real(*what, later)

    setattr(module, name, write)


def slow_cache() -> None:
    """An encoder that takes long for each entry."""
    from trainer.engine.caching.store import Cache

    real = Cache.write

    def write(self: Cache, kind: str, key: str, tensors: Any) -> None:
        time.sleep(ENTRY_SECONDS)
        real(self, kind, key, tensors)

    Cache.write = write  # type: ignore[method-assign]


def slow_rank(seconds: float = RANK_SECONDS) -> None:
    """Rank 1 takes long for each micro-batch."""
    if os.environ["RANK"] == "1":
        from trainer.engine.training import loop

        real = loop.compute

        def compute(*args: Any) -> Any:
            time.sleep(seconds)
            return real(*args)

        loop.compute = compute


def far_slower_rank() -> None:
    """Rank 1 takes several times as long as any other one, also where the machine does much else."""
    slow_rank(FAR_SECONDS)


def slow_preview() -> None:
    """Previews that take long for each denoising step."""
    from trainer.engine.context import Context

    real = Context.alive

    def alive(self: Context, phase: Any, **rest: Any) -> None:
        if phase == "preview":
            time.sleep(PREVIEW_SECONDS)
        real(self, phase, **rest)

    Context.alive = alive  # type: ignore[method-assign]


def slow_images() -> None:
    """Previews of step 6 that take long to come to the disk, one after the other."""
    from trainer.engine.training import preview

    real = preview.write_drawn

    def write(context: Any, entries: Any, number: int, drawn: Any, target: Path) -> None:
        real(context, entries, number, drawn, target)
        if target.parent.name == "step-000006":
            time.sleep(IMAGE_SECONDS)

    preview.write_drawn = write


def failing_rank() -> None:
    """Rank 1 has an error of ours in its fourth micro-batch, which no other is told of."""
    if os.environ["RANK"] == "1":
        from trainer.engine.training import loop
        from trainer.errors import DataError

        real, calls = loop.compute, []

        def compute(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 4:
                raise DataError("rank 1 alone cannot go on")
            return real(*args)

        loop.compute = compute


def alone() -> None:
    """A process group that must not be used while a rank computes, draws, saves or exports by itself."""
    import torch.distributed as dist

    from trainer.engine.results import proof
    from trainer.engine.training import loop, preview

    busy: list[str] = []

    def guarded(module: Any, name: str) -> None:
        real = vars(module)[name]

        def call(*args: Any, **rest: Any) -> Any:
            busy.append(name)
            try:
                return real(*args, **rest)
            finally:
                busy.pop()

        setattr(module, name, call)

    def refused(name: str) -> None:
        real = vars(dist)[name]

        def call(*args: Any, **rest: Any) -> Any:
            assert not busy, f"{name} within {busy}"
            CALLS.append(name)
            return real(*args, **rest)

        setattr(dist, name, call)

    guarded(loop, "_micro_batch")
    guarded(loop, "save")
    guarded(preview, "_own_share")
    guarded(proof, "export_lora")
    for name in (
        "all_gather",
        "all_gather_object",
        "all_to_all_single",
        "broadcast_object_list",
        "all_reduce",
    ):
        refused(name)
    atexit.register(lambda: print("calls:", len(CALLS), sorted(set(CALLS)), file=sys.stderr))


def flipped_rank() -> None:
    """One bit of one weight of rank 1 flips after its third step."""
    if os.environ["RANK"] == "1":
        from trainer.engine.optimizing.updater import Updater

        real = Updater.step

        def step(self: Updater, rate: float, loss: Any) -> Any:
            found = real(self, rate, loss)
            if self.steps_taken == 3:
                weight = next(iter(self.weights().values())).view(torch.int32).view(-1)
                weight[0] ^= 1
            return found

        import torch

        Updater.step = step  # type: ignore[method-assign]


def read_when_staged() -> None:
    """Every operator refuses a weight that is not staged, wherever it is read: also where torch has no error
    of its own.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Guard(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            empty = [one for one in read if one.numel() and not one.is_meta]
            empty = [one for one in empty if one.untyped_storage().nbytes() == 0]
            # a view reads nothing, and one of a page stays a view of it
            if empty and not function.is_view:
                raise AssertionError(f"{function} reads {tuple(empty[0].shape)}, which is not staged")
            CALLS.append(str(function))
            return function(*args, **(kwargs or {}))

    Guard().__enter__()
    atexit.register(lambda: print("guarded operators:", len(CALLS), file=sys.stderr))


def reads_unstaged() -> None:
    """An export that reads weights of blocks which do not compute, as one with a defect would."""
    read_when_staged()
    from trainer.engine.results import proof
    from trainer.modeling.storage.staging import _StagedBlock

    real = proof.export_lora

    def export(context: Any, model: Any, step: int) -> Any:
        block = next(one for one in model.modules() if isinstance(one, _StagedBlock))
        block.staged.empty()
        weight = next(one for one in block.parameters() if not one.requires_grad and one.ndim == 2)
        weight.clone()  # ends the process, where nobody guards it
        return real(context, model, step)

    proof.export_lora = export


def other_code() -> None:
    """Source files with another digest."""
    from trainer.engine.hosts import introduction

    introduction.code_digest = lambda: "0" * 8


def impatient() -> None:
    """A host that waits for others for seconds, in place of half an hour."""
    from trainer.engine.meeting import meeting

    meeting.PATIENCE_SECONDS = 7.0


def small_edits() -> None:
    """Pictures before an edit that are scaled to a few pixels, in place of a megapixel."""
    from tests.contract.runs import keep_edits_small, keep_kontexts_small

    keep_edits_small(setattr)
    keep_kontexts_small(setattr)


PATCHES: dict[str, Callable[[], None]] = {
    "save": slow_save,
    "second save": slow_second_save,
    "export": slow_export,
    "twin": slow_twin,
    "cache": slow_cache,
    "rank": slow_rank,
    "far_rank": far_slower_rank,
    "flipped": flipped_rank,
    "alone": alone,
    "preview": slow_preview,
    "images": slow_images,
    "failing": failing_rank,
    "guarded": read_when_staged,
    "unstaged": reads_unstaged,
    "edits": small_edits,
    "code": other_code,
    "impatient": impatient,
}
"""Patches of the training process, by the knob `patch`."""


def main() -> int:
    if sys.argv[1] == "--child":
        PATCHES[sys.argv[2]]()
        from trainer.engine.__main__ import main as train

        return train(sys.argv[3])
    return parent(json.loads(sys.argv[1]), sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
