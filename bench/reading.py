"""`bench reading FAMILY`: a base's files, read by one GPU beside several that share the reading.

    python -m bench reading flux1_dev --base BASE --folder DIR --record docs/benchmarks/NAME.json

Writes the trained component's files at full size with random values, then loads them as `trainer train` does
in bf16: by one process, by one for each GPU of which all get everything (`replicated`), and by as many that
part the blocks (`sharded`). Before each the files leave the page cache. Seconds are from all processes being
there to the last one having its base; what each read is by /proc/self/io, which sees no file that is mapped,
as on a CPU. TRAINER_PROFILE=cpu tries it without GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from bench import arguments as types
from bench import jobs, load, ours
from bench.processes import GIB, REPOSITORY
from bench.ranks import USUAL, WAYS
from bench.record import update_table
from trainer import families
from trainer.cli.measure import planned
from trainer.cli.options import Layers
from trainer.config import environment
from trainer.errors import HardwareError
from trainer.machine import description, idle

COLUMNS = (
    *("family", "way", "GPUs", "seconds", "fastest to slowest", "of one"),
    *("GiB of files", "GiB read by each", "GiB on each GPU"),
)
SHARD_BYTES = 10 * 10**9
_POOL_VALUES = 2**26
_MEETING_SECONDS = 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, measure, print, and write the record."""
    options = parser().parse_args(arguments)
    options.base = types.require_base(options.base, "--base")
    if environment.read("TRAINER_PROFILE") != "cpu":
        idle.require_gpu(remedy="use a machine with several; TRAINER_PROFILE=cpu tries it on a CPU")
    base = options.folder / f"reading-{options.family}"
    if not base.is_dir():
        half = base.with_suffix(".half")
        shutil.rmtree(half, ignore_errors=True)
        write_base(options.family, options.base, half)
        half.rename(base)
    files = sorted((base / families.get(options.family).trained_component).glob("*.safetensors"))
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(options.rounds):
        for way in options.ways:
            load.prepare(files, "cold")
            found.setdefault(way, []).append(loaded(options, base, way))
            print(f"{way}: {json.dumps(found[way][-1])}", file=sys.stderr, flush=True)
    rows = _rows(options, found, sum(file.stat().st_size for file in files))
    for row in rows:
        print(json.dumps(dict(zip(COLUMNS, row, strict=True))))
    if options.record:
        write_record(options, rows)
    if not options.keep:
        shutil.rmtree(base)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    one = types.command_parser("reading", __doc__)
    one.add_argument("family", choices=families.names())
    one.add_argument("--base", type=Path, required=True, help="folder with the full-size configs")
    one.add_argument("--folder", type=types.folder, required=True, help="on the disk to read from")
    one.add_argument("--gpus", type=types.positive, default=2, help="GPUs of the ways but `one`")
    ways = types.names_of("way", USUAL)
    one.add_argument("--ways", type=ways, default=USUAL, metavar="NAME,NAME")
    one.add_argument("--rounds", type=types.positive, default=2)
    one.add_argument("--keep", action="store_true", help="leave the files for the next time")
    one.add_argument("--record", type=Path, help="docs/benchmarks/NAME.json, whose other rows stay")
    types.add_common(one, "--set", "--month")
    return one


def write_base(family_name: str, configs: Path, folder: Path) -> None:
    """A copy of a base's configs, with files of random bf16 values for its trained component."""
    import torch

    from trainer.modeling.base.source import ModelSource
    from trainer.modeling.base.structure import built_empty
    from trainer.modeling.quiet import quiet_libraries
    from trainer.modeling.tensor_file import split_shards, write_tensors

    quiet_libraries()
    family = families.get(family_name)
    others = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json")
    shutil.copytree(configs, folder, ignore=others)
    component = folder / family.trained_component
    source = ModelSource(folder=folder, identity="", revision=None, random_components=frozenset(), seed=0)
    empty = built_empty(family.model_class(source), component, torch.bfloat16)
    shards = split_shards(empty.state_dict(), SHARD_BYTES)
    pool = torch.randn(_POOL_VALUES, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    library = "diffusion_pytorch_model" if family.trained_component else "model"
    for number, shard in enumerate(shards, 1):
        values = {name: _values(pool, name, tensor) for name, tensor in shard.items()}
        write_tensors(component / f"{library}-{number:05}-of-{len(shards):05}.safetensors", values, {}, None)


def _values(pool: Any, name: str, like: Any) -> Any:
    """Values for a tensor out of a pool, from a place that its name gives: few are drawn for many files."""
    count = like.numel()
    start = zlib.crc32(name.encode()) % max(1, pool.numel() - count)
    whole = pool.repeat(-(-count // pool.numel())) if count > pool.numel() else pool[start:]
    return whole[:count].view(like.shape).to(like.dtype)


def loaded(options: argparse.Namespace, base: Path, way: str) -> dict[str, Any]:
    """Load in processes that meet; gives seconds, and bytes read and held by each."""
    count = 1 if way == "one" else options.gpus
    spread = [f"parallel.gpus={count}", f"train.gradient_accumulation_steps={count}"]
    spread += [f"parallel.shard={WAYS[way]}"] if WAYS[way] else []
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.folder) as name:
        folder = Path(name)
        features = {"weights": "bf16", "compute": "bf16"}
        shipped = REPOSITORY / "train_configs" / f"{options.family}_lora.yaml"
        sets = ours.write_data_set(options.family, folder / "data", resolution=64, tokens=512)
        layer = ours.base_layer(base, sets, folder / "cache", features, steps=1, batch=1)
        (folder / "layer.yaml").write_text(yaml.safe_dump(layer))
        found = Layers(
            [shipped, folder / "layer.yaml"], (*options.overrides, *spread), None, folder / "run"
        ).load()
        plan = planned(found, probe=False)[1]
        given = [{"rank": rank, "size": count, "place": folder / "meet"} for rank in range(count)]
        places = [folder / f"rank-{rank}" for rank in range(count)]
        for place in places:
            place.mkdir()
        with ThreadPoolExecutor(count) as pool:
            ended = list(
                pool.map(lambda one: jobs.call(load_one, found, plan, *one), zip(places, given, strict=True))
            )
    if any(one.code for one in ended):
        raise HardwareError(
            f"{way}: a process could not load (exit codes {', '.join(str(one.code) for one in ended)})",
            where="--ways",
            remedy="the lines above say why",
        )
    answers = [one.answer for one in ended]
    return {
        "seconds": max(one["ended"] for one in answers) - max(one["began"] for one in answers),
        "read": [one["read"] for one in answers],
        "held": [one["held"] for one in answers],
    }


def load_one(spec: str, *, rank: int, size: int, place: str) -> dict[str, Any]:
    """One rank: meets the others, loads its base, tells when."""
    import torch

    from trainer.engine.building.build import load_base
    from trainer.engine.context import apply_backend_settings
    from trainer.engine.ranks import joined
    from trainer.modeling.storage.shared_memory import held_bytes

    context = jobs.make_context(spec)
    # random are the other components alone, which have no files here and are not loaded
    context = dataclasses.replace(
        context, source=dataclasses.replace(context.source, random_components=frozenset())
    )
    end = time.monotonic() + _MEETING_SECONDS

    def look() -> None:
        if time.monotonic() > end:
            what = f"another process did not come within {_MEETING_SECONDS:.0f} s"
            raise HardwareError(what, where="--ways", remedy="its lines above say why")

    with joined(rank, size, Path(place), device=context.plan.device, look=look) as ranks:
        context = dataclasses.replace(context, ranks=ranks)
        apply_backend_settings(context)
        ranks.connect(context.device)
        context.family.model_class(context.source)  # imported before, and not measured
        ranks.meet()
        began, read = time.monotonic(), _read_bytes()
        model = load_base(context)
        if on_gpu := context.plan.device == "cuda":
            torch.cuda.synchronize()
        ended, read = time.monotonic(), _read_bytes() - read
        held = torch.cuda.memory_allocated() + held_bytes() if on_gpu else 0
        require_read(model.module, context.source.component(context.family.trained_component))
        del model
        ranks.meet()
    return {"began": began, "ended": ended, "read": read, "held": held}


def require_read(module: Any, folder: Path) -> None:
    """Compare small tensors with those of the files.

    Raises HardwareError where one differs or none is there.
    """
    import torch
    from safetensors import safe_open

    compared, own = 0, module.state_dict()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                # of blocks that lie elsewhere the storage is empty
                held = own.get(name)
                if held is None or held.ndim != 1 or not held.untyped_storage().nbytes():
                    continue
                if not torch.equal(held.cpu(), file.get_tensor(name).to(held.dtype)):
                    what = f"{name} is not what {path.name} holds"
                    raise HardwareError(what, where=str(folder), remedy="was the base read from files?")
                compared += 1
    if not compared:
        what = "no tensor of the model could be compared with the files"
        raise HardwareError(what, where=str(folder), remedy="was the base read from other files?")


def _read_bytes() -> int:
    """Bytes that this process asked its files for so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def _rows(
    options: argparse.Namespace, found: dict[str, list[dict[str, Any]]], size: int
) -> list[tuple[str, ...]]:
    rows, alone = [], 0.0
    for way, samples in found.items():
        seconds = [one["seconds"] for one in samples]
        median = statistics.median(seconds)
        alone = median if way == "one" else alone
        rows.append(
            (
                *(options.family, way, str(len(samples[0]["read"])), f"{median:.1f}"),
                f"{min(seconds):.1f} to {max(seconds):.1f}",
                f"{median / alone:.2f}" if alone else "",
                f"{size / GIB:.1f}",
                *(", ".join(f"{one / GIB:.1f}" for one in samples[0][what]) for what in ("read", "held")),
            )
        )
    return rows


def write_record(options: argparse.Namespace, rows: Sequence[tuple[str, ...]]) -> None:
    """The record with these rows in the place of those of the same family and way."""
    update_table(
        options.record,
        rows,
        keys=2,
        title="A base's files read by several GPUs",
        where=description.describe(options.month),
        command="python -m bench reading FAMILY --base BASE --folder DIR --record FILE",
        columns=COLUMNS,
    )
