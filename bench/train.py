"""`bench train FAMILY`: a LoRA step of ours beside those that others write, alternating on an idle GPU.

    python scripts/random_base.py flux1_dev --size full --no-weights --output BASE
    python -m bench train flux1_dev --base BASE --rounds 2 --record docs/benchmarks/NAME.json

Every variant runs in a process of its own: round 1 all of them, round 2 all of them again. Ours go through
`trainer train` and a small data set; the others are those of bench/peers.py. One line of JSON a
variant goes to stdout; where none has figures, no record is written and the exit code is 1.
TRAINER_PROFILE=cpu tries it without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import arguments as types
from bench import jobs, ours, processes
from bench.profile import profile
from bench.record import Record, Row, merge, to_json
from trainer import families
from trainer.config import environment
from trainer.files import atomic
from trainer.machine import description, idle

PEERS: Mapping[str, str] = {"diffusers": "bf16", "compiled": "bf16", "torchao": "fp8", "quanto": "bf16"}
"""Variants of bench/peers.py, which imports torch, and what their frozen layers multiply in."""
PRECISIONS: Mapping[str, str] = {
    **{name: "fp8" if features.get("compute") == "fp8" else "bf16" for name, features in ours.OURS.items()},
    **PEERS,
}
VARIANTS = ("ours-bf16", "ours-fp8", "diffusers", "compiled", "torchao", "quanto")
_PROFILED_STEPS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the record."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    options.base = types.require_base(options.base, "--base")
    family = families.get(options.family)
    if options.tokens is None:
        options.tokens = 4096 if family.sample_kind == "conversation" else 512
    on_gpu = environment.read("TRAINER_PROFILE") != "cpu"
    if on_gpu:
        idle.require_gpu(remedy="use a machine with one; TRAINER_PROFILE=cpu measures the CPU instead")
        idle.require_idle()
    job = _job(options)
    samples: dict[str, list[dict[str, Any]]] = {variant: [] for variant in options.variants}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.work) as name:
        for number in range(1, options.rounds + 1):
            for variant in options.variants:
                if any(sample.get("problem") for sample in samples[variant]):
                    continue
                if on_gpu:
                    idle.require_idle(patience=idle.PATIENCE_SECONDS)
                profile = options.profile and number == 1
                sample = run_variant(job, variant, Path(name), number, profile=profile, memory=options.memory)
                samples[variant].append(sample)
                print(f"round {number}, {variant}: {_short(sample)}", file=sys.stderr, flush=True)
        record = _record(options, job, samples, given)
    for row in record.rows:
        print(json.dumps(_printed(row), sort_keys=True))
    if all(row.milliseconds is None for row in record.rows):
        print("no variant has figures: nothing is recorded", file=sys.stderr)
        return 1
    if options.record:
        atomic.write_text(options.record, to_json(record))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    one = types.command_parser("train", __doc__)
    one.add_argument("family", choices=families.names())
    one.add_argument("--base", type=Path, required=True, help="folder with the full-size configs")
    one.add_argument("--variants", type=types.names_of("variant", PRECISIONS), default=VARIANTS,
                     help=f"out of {', '.join(PRECISIONS)}")  # fmt: skip
    one.add_argument("--resolution", type=types.positive, default=1024)
    one.add_argument("--batch", type=types.positive, default=1)
    one.add_argument("--rank", type=types.positive, default=16)
    one.add_argument("--tokens", type=types.positive, help="text tokens: 512; a language model's row: 4096")
    one.add_argument("--steps", type=types.positive, default=20, help="timed steps of a round")
    one.add_argument("--warmup", type=types.not_negative, default=6, help="steps before them")
    one.add_argument("--rounds", type=types.positive, default=2)
    one.add_argument("--profile", action="store_true", help="profile three further steps of each variant")
    one.add_argument("--memory", action="store_true", help="ask the driver what is in use, every two seconds")
    one.add_argument("--floor", type=types.amount, help="milliseconds, in place of the computed floor")
    one.add_argument("--ceilings", type=_ceilings, default={}, metavar="bf16=765,...",
                     help="kernel rates for the floor, 1e12 operations a second")  # fmt: skip
    one.add_argument("--title", help="of the record")
    types.add_common(one, "--set", "--record", "--month", "--work")
    return one


def _ceilings(text: str) -> dict[str, float]:
    from bench.floor import Ceilings

    found = {name: types.amount(rate) for name, _, rate in (part.partition("=") for part in text.split(","))}
    known = [field.name for field in dataclasses.fields(Ceilings)]
    unknown = [name for name in found if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"no rate {', '.join(unknown)}; there are {', '.join(known)}")
    return found


def _job(options: argparse.Namespace) -> ours.Job:
    given = {
        field.name: vars(options)[field.name]
        for field in dataclasses.fields(ours.Job)
        if field.name in options
    }
    return ours.Job(**{**given, "overrides": tuple(options.overrides)})


def run_variant(
    job: ours.Job, variant: str, work: Path, number: int, *, profile: bool, memory: bool
) -> dict[str, Any]:
    """One variant in one round."""
    folder = work / f"{variant}-{number}"
    if variant in PEERS:
        folder.mkdir()
        return _peer(job, variant, folder, profile=profile)
    sample = ours.train(job, variant, folder, work / "shared", memory=memory)
    if profile and "problem" not in sample:
        idle.require_idle(patience=idle.PATIENCE_SECONDS)
        sample |= _profile(job, folder)
    return sample


def _peer(job: ours.Job, variant: str, folder: Path, *, profile: bool) -> dict[str, Any]:
    from bench import peers

    given = {"variant": variant, "job": dataclasses.asdict(job), "profile": profile}
    ended = processes.call(peers.measure, given, log=folder / "log.txt")
    return ours.problem(ended) if ended.code else {**ended.answer, "host_gib": ended.host_gib}


def _profile(job: ours.Job, folder: Path) -> dict[str, Any]:
    """Busy fraction and copy share of the run's configuration, measured on a synthetic batch."""
    given = {"steps": _PROFILED_STEPS, "tokens": job.tokens}
    configs, log = ours.configs(job, folder), folder / "profile.txt"
    ended = jobs.call_run(profile, configs, job.overrides, given, probe=True, log=log)
    if ended.code:
        print(ended.said[-2000:], file=sys.stderr)
        return {}
    return {key: ended.answer["figures"][key] for key in ("busy_fraction", "copy_share")}


def _record(
    options: argparse.Namespace, job: ours.Job, samples: Mapping[str, list[dict[str, Any]]], given: list[str]
) -> Record:
    described = description.describe(options.month)
    floors, ceilings = compute_floors(options, job, described)
    rows = []
    language = families.get(job.family).sample_kind == "conversation"
    for variant, found in samples.items():
        # what the plan chose, where it chose
        precision = next((str(one["precision"]) for one in found if "precision" in one), PRECISIONS[variant])
        row = Row(
            variant=variant,
            family=job.family,
            precision=precision,
            settings="",
            resolution=0 if language else job.resolution,
            batch=job.batch,
            rank=job.rank,
            tokens=job.tokens,
            floor_milliseconds=floors.get(precision),
        )
        rows.append(merge(row, found))
    return Record(
        title=options.title or families.get(job.family).title,
        text="",
        machine=described,
        command=recorded_command(given),
        rows=tuple(rows),
        ceilings=ceilings,
    )


def compute_floors(
    options: argparse.Namespace, job: ours.Job, described: description.Machine
) -> tuple[dict[str, float], dict[str, float]]:
    """The floor by precision, and the rates behind it; none where this GPU's rates are not known."""
    if options.floor is not None:
        return dict.fromkeys(PRECISIONS.values(), options.floor), {}
    if "H200" not in described.gpu and not options.ceilings:
        return {}, {}
    from bench.floor import H200, count_work, floor_milliseconds

    ceilings = dataclasses.replace(H200, **options.ceilings)
    work = count_work(families.get(job.family), job.base, job.shape)
    floors = {name: round(floor_milliseconds(work, name, ceilings), 1) for name in set(PRECISIONS.values())}
    return floors, dataclasses.asdict(ceilings)


def recorded_command(given: Sequence[str]) -> str:
    """The command as others would give it: folders by their role, not by where they were."""
    role = {"--base": "BASE", "--work": "DIR", "--record": "FILE"}
    parted = [one for word in given for one in (word.split("=", 1) if word.split("=")[0] in role else [word])]
    words = [role.get(before, shlex.quote(word)) for before, word in zip(["", *parted], parted, strict=False)]
    return " ".join(["python", "-m", "bench", "train", *words])


def _short(sample: Mapping[str, Any]) -> str:
    if "problem" in sample:
        return str(sample["problem"])
    times = sorted(sample["times"])
    return f"{times[len(times) // 2]:.1f} ms/step, peak {sample.get('allocated_gib', 0.0):.1f} GiB"


def _printed(row: Row) -> dict[str, Any]:
    share = row.share_of_floor
    return {**dataclasses.asdict(row), "share_of_floor": None if share is None else round(share, 3)}
