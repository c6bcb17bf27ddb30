"""Runs of several processes: the bits of one, ended together, and gone on with in any number."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.contract.real_shaped import few, settings
from tests.contract.runs import (
    ALIKE,
    COUSINS,
    LORA_CASES,
    STEPS,
    Case,
    Workshop,
    different,
    draws,
    edits,
    files,
    numbers,
    products,
    steps_saved,
    without,
)
from tests.contract.test_divergence import late_record, poison
from tests.contract.test_resumes import flip
from tests.e2e.conftest import Process, Start
from tests.e2e.harness import FAR_SECONDS
from tests.e2e.test_interruptions import KILLED, require_equal
from tests.ranks import is_gone
from trainer.engine.caching.entries import list_entries
from trainer.engine.training.feed import make_sampler
from trainer.errors import ExitCode
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics
from trainer.telemetry.status import Phase, rank_folder, read_status

FIRST = LORA_CASES[0]
TWO = "parallel.gpus=2"


def pids(process: Process, ranks: int) -> list[int]:
    """The processes that train, by rank, once all of them do."""

    def beating(rank: int) -> int | None:
        status = read_status(rank_folder(process.runtime, rank))
        return status.pid if status is not None and status.phase is Phase.TRAIN else None

    def all_beating() -> list[int] | None:
        found = [pid for rank in range(ranks) if (pid := beating(rank)) is not None]
        return found if len(found) == ranks else None

    return process.wait_for(all_beating)


def require_gone_after_kill(process: Process, children: list[int], rank: int) -> None:
    """A rank that is killed ends all within seconds, with a cause, and leaves nothing."""
    began = time.monotonic()
    os.kill(children[rank], signal.SIGKILL)
    code, errors = process.end()
    assert code == KILLED, errors
    assert time.monotonic() - began < 60  # far below every patience; the clock counts this machine's load
    assert f"rank {rank}: SIGKILL: killed from outside" in errors
    assert "Traceback" not in errors
    assert all(is_gone(pid) for pid in children)
    assert not list(process.runtime.glob("train-*"))


def ended(process: Process) -> str:
    code, errors = process.end(400)  # a family scales its control images to a megapixel
    assert code == 0, errors
    return errors


# the other families on a set of real shape, with one, two and four
WRITING = next(case for case in LORA_CASES if not draws(case.family))


@pytest.mark.parametrize("case", [FIRST, pytest.param(WRITING, marks=pytest.mark.slow)], ids=str)
def test_two_ranks_give_the_bits_of_one(
    case: Case, start: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    process = start(case, tmp_path, TWO)
    printed = ended(process)
    straight = uninterrupted(case)
    assert numbers(process.run_dir) == numbers(straight.run_dir)
    assert products(process.run_dir)
    assert not different(products(process.run_dir), products(straight.run_dir))
    kept = "checkpoints/*/*"
    assert not different(files(process.run_dir, kept), files(straight.run_dir, kept))
    assert "each takes 1 of a step's 2 micro-batches" in " ".join(printed.split())
    assert printed.count("Proved: ") == 1
    assert "rank 1" not in printed  # one of them speaks
    for run in (process, straight):
        # of the first line no step's time may be known yet
        _, *rows = read_metrics(run.run_dir / METRICS_LOG)
        assert all(row["compute_seconds_per_step"] > 0.0 for row in rows)


SHARDED = (TWO, "parallel.shard=full")
FEW_STEPS = (
    "train.max_train_steps=4",
    "validation.every_steps=3",
    "checkpoint.checkpointing_steps=2",
)
"""A line, a checkpoint and a round of previews before the last step, where runs are compared step by step."""


@pytest.mark.slow
@pytest.mark.parametrize("case", without(LORA_CASES, ALIKE, COUSINS), ids=str)
def test_a_base_over_two_ranks_gives_the_bits_of_a_whole_one(
    case: Case, start: Start, fork_ranks: Start, tmp_path: Path
) -> None:
    straight = fork_ranks(case, tmp_path / "straight", *FEW_STEPS)
    ended(straight)
    process = start(case, tmp_path, *SHARDED, *FEW_STEPS)
    printed = " ".join(ended(process).split())
    assert numbers(process.run_dir) == numbers(straight.run_dir)
    assert not different(products(process.run_dir), products(straight.run_dir))
    assert "blocks over 2" in printed and "blocks lie with 2 ranks in turn" in printed
    assert printed.count("Proved: ") == 1


def assert_shared_as_whole(start: Start, folder: Path, setting: str) -> None:
    """A run of this setting over two ranks, which share the base, has the bits of one process."""
    short = (setting, *FEW_STEPS)
    runs = [start(FIRST, folder / "one", *short), start(FIRST, folder / "two", *short, *SHARDED)]
    for process in runs:
        ended(process)
    one, two = (process.run_dir for process in runs)
    assert numbers(one) == numbers(two)
    assert not different(products(one), products(two))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["bf16", "int8", "nf4", "fp8"])
def test_every_storage_lies_with_two_ranks(weights: str, fork_ranks: Start, tmp_path: Path) -> None:
    assert_shared_as_whole(fork_ranks, tmp_path, f"features.weights={weights}")


@pytest.mark.slow
def test_modulation_is_read_backward_where_the_embedding_of_sigma_is_trained(
    fork_ranks: Start, tmp_path: Path
) -> None:
    """Elsewhere its weights are not there in backward: an operator that read them would end the process."""
    assert_shared_as_whole(fork_ranks, tmp_path, "lora.target_modules=[to_q, timestep_embedder.linear_1]")


@pytest.mark.slow
def test_a_base_over_four_ranks_and_then_a_whole_one(
    fork_ranks: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    """Steps of four samples, killed at a checkpoint and gone on with by one process."""
    four = ("train.train_batch_size=1", "train.gradient_accumulation_steps=4")
    straight = fork_ranks(FIRST, tmp_path / "straight", *four)
    ended(straight)
    process = fork_ranks(FIRST, tmp_path / "run", *four, "parallel.gpus=4", "parallel.shard=full")
    process.wait_until((process.run_dir / "checkpoints" / "step-000005").is_dir)
    children = pids(process, 4)
    os.kill(children[3], signal.SIGKILL)
    code, errors = process.end()
    assert code == KILLED, errors
    assert all(is_gone(pid) for pid in children)
    again = fork_ranks(FIRST, tmp_path / "run", *four)
    assert "resumed from step-000005" in ended(again)
    require_equal(again.run_dir, straight.run_dir)


@pytest.mark.slow
def test_stopped_by_two_and_gone_on_with_by_one_and_by_two(
    start: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    """The number of processes is the machine's, not the run's: a checkpoint does not know it."""
    late, slow = "checkpoint.checkpointing_steps=1000", {"patch": "rank"}
    process = start(FIRST, tmp_path, TWO, late, knobs=slow)
    children = pids(process, 2)
    process.popen.send_signal(signal.SIGTERM)
    code, errors = process.end()
    assert code == ExitCode.STOPPED, errors
    assert errors.count("stopped on request") == 1
    assert all(is_gone(pid) for pid in children)
    (saved,) = steps_saved(process.run_dir)

    process = start(FIRST, tmp_path)
    process.wait_until((process.run_dir / "checkpoints" / "step-000005").is_dir)
    os.kill(process.child(), signal.SIGKILL)
    code, errors = process.end()
    assert code == KILLED
    assert f"resumed from {saved}" in errors

    process = start(FIRST, tmp_path, TWO)
    assert "resumed from step-000005" in ended(process)
    require_equal(process.run_dir, uninterrupted(FIRST).run_dir)


def test_a_killed_rank_ends_the_run_within_seconds(fork: Start, tmp_path: Path) -> None:
    """Rank 0 is killed below, with the slow ones."""
    process = fork(FIRST, tmp_path, TWO, "train.max_train_steps=10000")
    children = pids(process, 2)
    process.wait_until((process.run_dir / "checkpoints" / "step-000005").is_dir)
    require_gone_after_kill(process, children, 1)


def test_sigterm_to_one_rank_stops_all_at_one_step(fork: Start, tmp_path: Path) -> None:
    process = fork(FIRST, tmp_path, TWO, "train.max_train_steps=10000")
    children = pids(process, 2)
    os.kill(children[1], signal.SIGTERM)
    code, errors = process.end()
    assert code == ExitCode.STOPPED, errors
    assert errors.count("stopped on request") == 1
    assert len(steps_saved(process.run_dir)) >= 1
    assert all(is_gone(pid) for pid in children)


@pytest.mark.slow
def test_an_end_that_was_agreed_on_waits_for_a_long_save(start: Start, tmp_path: Path) -> None:
    process = start(FIRST, tmp_path, TWO, "train.max_train_steps=10000", knobs={"patch": "save"})
    pids(process, 2)
    process.popen.send_signal(signal.SIGTERM)
    process.wait_for_phase(Phase.SAVE)
    began = time.monotonic()
    code, errors = process.end()
    assert code == ExitCode.STOPPED, errors
    assert time.monotonic() - began > 4  # longer than a rank waits to be ended
    assert "supervisor: rank" not in errors and "another rank" not in errors
    saved = steps_saved(process.run_dir)
    assert saved and all(one.startswith("step-") and "." not in one for one in saved)


@pytest.mark.slow
def test_a_stop_in_the_last_previews_is_told_once_and_they_are_drawn_again(
    start: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    process = start(FIRST, tmp_path, TWO, knobs={"patch": "preview"})
    process.wait_until(lambda: bool(list(process.run_dir.glob("lora/*.safetensors"))))
    process.wait_for_phase(Phase.PREVIEW)
    process.popen.send_signal(signal.SIGTERM)
    code, errors = process.end()
    assert code == ExitCode.STOPPED, errors
    assert errors.count("stopped on request") == 1
    assert "rank 1" not in errors
    again = start(FIRST, tmp_path, TWO)
    ended(again)
    assert not different(products(again.run_dir), products(uninterrupted(FIRST).run_dir))


def test_an_error_of_one_rank_that_was_not_agreed_on_ends_both(fork: Start, tmp_path: Path) -> None:
    process = fork(FIRST, tmp_path, TWO, "train.max_train_steps=10000", knobs={"patch": "failing"})
    children = pids(process, 2)
    code, errors = process.end()
    assert code == ExitCode.BAD_DATA, errors
    assert errors.count("rank 1: error: rank 1 alone cannot go on") == 1
    assert all(is_gone(pid) for pid in children)


@pytest.mark.slow
def test_nan_on_one_rank_is_named_and_changes_nothing(
    fork: Start, yard: Workshop, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    """Whichever rank has the sample, its file is named, once, and the step before is kept."""
    straight = uninterrupted(FIRST)
    job = yard.job(FIRST, tmp_path / "here", "validation.prompts=[]")
    cache = Path(shutil.copytree(straight.cache, tmp_path / "cache"))
    entries = list_entries(job.context, job.samples.training, job.samples.prompt_controls)
    sampler = make_sampler(job.context, entries)
    record, step = late_record([sampler.step(number) for number in range(STEPS)])
    there = yard.job(FIRST, tmp_path / "there", "validation.prompts=[]", cache=cache)
    poison(list_entries(there.context, there.samples.training, there.samples.prompt_controls), record)
    options = ("checkpoint.checkpointing_steps=1", "train.log_every_steps=1", "validation.prompts=[]")
    process = fork(FIRST, tmp_path / "run", TWO, *options, cache=cache)
    code, errors = process.end()
    assert code == ExitCode.DIVERGED, errors
    assert str(entries.records[record].path) in errors
    assert errors.count("is NaN or infinite") == 1
    assert steps_saved(process.run_dir)[-1] == f"step-{step - 1:06d}"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_entry_that_one_rank_cannot_read_loses_no_step(
    rank: int, fork: Start, yard: Workshop, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    """The last step before it is saved, the entry is named once, and the run goes on to the same end."""
    straight = uninterrupted(FIRST)
    parted = ("train.train_batch_size=1", "train.gradient_accumulation_steps=2")  # as two ranks share it
    job = yard.job(FIRST, tmp_path / "here", *parted)
    cache = Path(shutil.copytree(straight.cache, tmp_path / "cache"))
    entries = list_entries(job.context, job.samples.training, job.samples.prompt_controls)
    sampler = make_sampler(job.context, entries)
    first: dict[int, tuple[int, int]] = {}
    for step in range(STEPS):
        for number, (sample,) in enumerate(sampler.step(step)):
            first.setdefault(sample.record, (step, number % 2))
    step, record = max((at, record) for record, (at, reader) in first.items() if reader == rank)
    assert step > 0
    there = yard.job(FIRST, tmp_path / "there", cache=cache)
    held = list_entries(there.context, there.samples.training, there.samples.prompt_controls)
    path = held.cache.path("latents", held.latents[record].key)
    flip(path)

    process = fork(FIRST, tmp_path / "run", TWO, "checkpoint.checkpointing_steps=1000", cache=cache)
    code, errors = process.end()
    assert code == ExitCode.BAD_DATA, errors
    # gone, where the threads that read ahead met it twice
    assert errors.count(f"{path}: this cache entry is ") == 1
    assert steps_saved(process.run_dir) == [f"step-{step:06d}"]
    rows = [json.loads(line) for line in (process.run_dir / "log.jsonl").read_text().splitlines()]
    assert [row["message"].count(str(path)) for row in rows if row["level"] == "error"] == [1]

    process = fork(FIRST, tmp_path / "run", TWO, cache=cache)
    assert f"resumed from step-{step:06d}" in ended(process)
    assert numbers(process.run_dir) == numbers(straight.run_dir)
    assert not different(products(process.run_dir), products(straight.run_dir))


@pytest.mark.slow
def test_held_out_samples_that_one_rank_cannot_read_end_both(
    start: Start, yard: Workshop, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    measured = ("validation.held_out=2", "validation.prompts=[]", "checkpoint.checkpointing_steps=1000")
    cache = Path(shutil.copytree(uninterrupted(FIRST).cache, tmp_path / "cache"))
    process = start(FIRST, tmp_path / "first", *measured, "train.max_train_steps=1", cache=cache)
    ended(process)
    job = yard.job(FIRST, tmp_path / "here", *measured, cache=cache)
    held = list_entries(job.context, job.samples.held_out)
    path = held.cache.path("latents", held.latents[1].key)
    flip(path)
    process = start(FIRST, tmp_path / "run", TWO, *measured, cache=cache)
    code, errors = process.end()
    assert code == ExitCode.BAD_DATA, errors
    assert errors.count("this cache entry is damaged") == 1
    assert not list((process.run_dir / "checkpoints").glob("*"))


@pytest.mark.slow
def test_a_slow_rank_is_named_once_and_the_run_goes_on(start: Start, tmp_path: Path) -> None:
    options = ("train.max_train_steps=24", "validation.prompts=[]", "validation.held_out=0")
    process = start(FIRST, tmp_path, TWO, *options, knobs={"patch": "far_rank"})
    errors = ended(process)
    assert errors.count("times as long as the others") == 1
    assert "rank 1 takes " in errors
    rows = read_metrics(process.run_dir / METRICS_LOG)
    assert rows[-1]["compute_seconds_per_step"] >= FAR_SECONDS


@pytest.mark.parametrize(
    ("every", "saved"),
    [(3, []), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, ["step-000002"]), (1000, [])))],
)
def test_a_flipped_bit_of_one_rank_ends_the_run_and_is_never_saved(
    every: int, saved: list[str], fork: Start, tmp_path: Path
) -> None:
    """It flips in the third step: in one that is saved, before one that is, and where nothing is due."""
    due = f"checkpoint.checkpointing_steps={every}"
    process = fork(FIRST, tmp_path, TWO, due, "validation.held_out=0", knobs={"patch": "flipped"})
    code, errors = process.end()
    assert code == ExitCode.HARDWARE, errors
    assert errors.count("do not hold equal weights any more; after step 2 they did") == 1
    assert steps_saved(process.run_dir) == saved


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("parallel.gpus=3",), "3 do not share the 2 samples of a step evenly"),
        (("parallel.gpus=0",), "parallel.gpus"),
    ],
)
def test_a_number_that_does_not_share_a_step_is_refused(
    overrides: tuple[str, ...], words: str, start: Start, tmp_path: Path
) -> None:
    code, errors = start(FIRST, tmp_path, *overrides).end()
    assert code == ExitCode.BAD_CONFIG
    assert words in errors


@pytest.mark.slow
def test_ranks_talk_at_ends_only(
    start: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    """No collective in a forward or backward pass, a preview, a save or an export: none can hang in one."""
    process = start(FIRST, tmp_path, TWO, knobs={"patch": "alone"})
    errors = ended(process)
    assert not different(products(process.run_dir), products(uninterrupted(FIRST).run_dir))
    counts = [int(line.split()[1]) for line in errors.splitlines() if line.startswith("calls: ")]
    assert len(counts) == 2
    assert counts[0] == counts[1] > STEPS


@pytest.mark.slow
def test_nothing_reads_a_weight_that_is_not_staged(
    fork_ranks: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    """Training, previews, held-out loss, proof and both files: no operator meets an empty page."""
    process = fork_ranks(FIRST, tmp_path, *SHARDED, knobs={"patch": "guarded"})
    errors = ended(process)
    assert not different(products(process.run_dir), products(uninterrupted(FIRST).run_dir))
    counts = [int(line.split()[2]) for line in errors.splitlines() if line.startswith("guarded operators: ")]
    assert len(counts) == 2 and min(counts) > 1000


@pytest.mark.slow
def test_a_weight_that_is_read_without_being_staged_is_an_error(fork_ranks: Start, tmp_path: Path) -> None:
    process = fork_ranks(FIRST, tmp_path, *SHARDED, knobs={"patch": "unstaged"})
    code, errors = process.end(400)
    assert code == 1, errors
    assert "aten.clone.default reads " in errors and "which is not staged" in errors


MOMENTS = {
    "cache": ("cache", lambda status: status.phase is Phase.CACHE and (status.step or 0) > 1),
    "train": (None, lambda status: status.phase is Phase.TRAIN and (status.step or 0) > 3),
    "save": ("save", lambda status: status.phase is Phase.SAVE),
}
"""Knob of the harness that makes a moment long, and whether rank 0 is in it."""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_killed_at_any_moment_ends_both_and_the_run_goes_on(
    moment: str, rank: int, start: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    slow, is_there = MOMENTS[moment]
    knobs = None if slow is None else {"patch": slow}
    cache = tmp_path / "cache" if moment == "cache" else None
    process = start(FIRST, tmp_path, TWO, knobs=knobs, cache=cache)

    def both() -> list[int] | None:
        found = [read_status(rank_folder(process.runtime, one)) for one in (0, 1)]
        there = [one.pid for one in found if one is not None and one.pid != process.popen.pid]
        return there if found[0] is not None and len(there) == 2 and is_there(found[0]) else None

    children = process.wait_for(both)
    require_gone_after_kill(process, children, rank)
    again = start(FIRST, tmp_path, TWO, cache=cache)
    ended(again)
    require_equal(again.run_dir, uninterrupted(FIRST).run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("model.dtype=bf16",),
        ("model.dtype=fp16", "train.ema_decay=0.9"),
        ("lora.type=dora", "model.dtype=bf16"),
        ("lora.type=lokr", "lora.alpha_pattern={to_k: 3}"),
        ("train.optimizer=adamw_8bit", "lora.rank=128"),
        ("features.weights=int8",),
    ],
    ids=" ".join,
)
def test_two_ranks_give_the_bits_of_one_with_other_options(
    options: tuple[str, ...], start: Start, tmp_path: Path
) -> None:
    done = []
    for number in (1, 2):
        process = start(FIRST, tmp_path / str(number), *options, *FEW_STEPS, f"parallel.gpus={number}")
        ended(process)
        done.append(process.run_dir)
    assert numbers(done[0]) == numbers(done[1])
    assert products(done[0])
    assert not different(products(done[0]), products(done[1]))
    assert not different(files(done[0], "checkpoints/*/*"), files(done[1], "checkpoints/*/*"))


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "steps", "ranks"), [(1, 4, (1, 2, 4)), (2, 2, (1, 2))])
def test_few_samples_of_two_shapes_are_shared_as_one_process_takes_them(
    batch: int, steps: int, ranks: tuple[int, ...], fork_ranks: Start, tmp_path: Path
) -> None:
    """Three pictures for four ranks; and batches that are parted by shape, so that rounds are short."""
    folder = tmp_path / "three"
    folder.mkdir()
    for number, size in enumerate(((96, 64), (64, 96), (64, 96))):
        Image.effect_noise(size, 60.0 + number).convert("RGB").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    options = (
        f"data.sets=[{{img_dir: {folder}}}]",
        "validation.held_out=0",
        f"train.train_batch_size={batch}",
        f"train.gradient_accumulation_steps={steps}",
    )
    done = []
    for number in ranks:
        process = fork_ranks(FIRST, tmp_path / str(number), *options, f"parallel.gpus={number}")
        printed = " ".join(ended(process).split())
        assert "10 steps see 40 samples: 13.3 epochs of 3" in printed
        assert ("micro-batches a step, of 1 to 2 samples" in printed) == (batch == 2)
        done.append(process.run_dir)
    for other in done[1:]:
        assert numbers(other) == numbers(done[0])
        assert not different(products(other), products(done[0]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", without(LORA_CASES, ALIKE), ids=str)
def test_one_two_and_four_ranks_are_equal_on_a_set_of_real_shape(
    case: Case, start: Start, fork_ranks: Start, tmp_path: Path
) -> None:
    """With EMA, an adapter's dropout, dropped captions and batches of two that are parted by shape.

    Of one family a kind the second of two ranks is a process of its own, with another order of hashes; the
    runs of the others, which come from two nurseries in turn, differ in that order alone.
    """
    more = ("train.ema_decay=0.9", "lora.dropout=0.1")
    more += ("train.train_batch_size=2", "train.gradient_accumulation_steps=4")
    more += ("train.max_train_steps=2", "validation.every_steps=2", "checkpoint.checkpointing_steps=1")
    # one rank of two draws two previews, and of four one draws none
    more += ('validation.prompts=["an apple", "a red car", "a cup"]',)
    chosen = (*settings(case.family), few(case.family, tmp_path / "few"), *more)
    knobs = {"patch": "edits"} if edits(case.family) else None  # in megapixels it would take minutes
    done = []
    for number in (1, 2, 4):
        starts_own = number == 2 and case.family in ("qwen_image", "qwen_image_edit", "llama")
        process = (start if starts_own else fork_ranks)(
            case, tmp_path / str(number), *chosen, f"parallel.gpus={number}", knobs=knobs
        )
        ended(process)
        done.append(process.run_dir)
    for other in done[1:]:
        assert numbers(other) == numbers(done[0])
        assert not different(products(other), products(done[0]))
        assert not different(files(other, "checkpoints/*/*"), files(done[0], "checkpoints/*/*"))
    assert products(done[0])
