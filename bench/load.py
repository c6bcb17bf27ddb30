"""Time shards on their way to the device: the disk alone, both libraries, and ours, cold and cached.

    python -m bench load --gib 22 --files 3 --folder DIR
    python -m bench load --gib 22 --folder DIR --rings 4x64x16,16x16x16,8x64x32

Writes files of random bf16 tensors, then reads them in every way, each in a process of its own so that what
it adds to the host's memory is its own. Prints one line of JSON for each measurement and a table in the end.
`--rings` adds rings of MiB a piece x pieces x threads. Tensors stay on the device, as a model's do. On a CPU
only whether it all runs can be seen: there safetensors maps files and copies nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import arguments as types
from bench import processes
from bench.processes import GIB
from trainer.errors import HardwareError

MIB = 2**20
TENSOR_BYTES = 60 * MIB
# as many distinct ones are written in turn: the disk is not to find equal blocks close by
DISTINCT_TENSORS = 8
ROW = 3072
THREADS, PIECE_BYTES = 16, 8 * MIB
STATES = ("cold", "cached")
VARIANTS = (
    *("raw-direct", "raw-buffered", "safetensors", "fastsafetensors", "fastsafetensors-tuned"),
    *("fastsafetensors-batched", "direct", "buffered", "auto"),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One reading of all files."""

    variant: str
    state: str
    gib_per_second: float
    seconds: float
    host_growth_mib: float
    """Resident memory at its highest beyond that before the first read."""
    device_peak_gib: float
    how: str
    """The method that `auto` chose for the first file."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write, measure every variant in both states, print."""
    options = _options(arguments)
    paths = write_files(options.folder, options.gib, options.files)
    variants = [
        *options.variants,
        *(f"{way}@{ring}" for ring in options.rings for way in ("direct", "buffered")),
    ]
    found: list[Measured] = []
    for _ in range(options.repeats):
        for state in STATES:
            for variant in variants:
                share = prepare(paths, state)
                measured = in_child(variant, state, paths, options.device)
                found.append(measured)
                line = asdict(measured) | {"cached_share_before": share, "gib": round(_size(paths) / GIB, 2)}
                print(json.dumps(line), flush=True)
    print(table(found))
    print("no verdict without a GPU" if options.device == "cpu" else verdict(found))
    if not options.keep:
        for path in paths:
            path.unlink()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = types.command_parser("load", __doc__)
    add = parser.add_argument
    add("--gib", type=types.amount, default=22.0, help="size of all files")
    add("--files", type=types.positive, default=3)
    add("--folder", type=types.folder, default=Path("build/bench-load"),
        help="on the disk to measure; build/bench-load is made if need be")  # fmt: skip
    add("--device", default="", help="default: cuda:0 where there is one, else cpu")
    add("--repeats", type=types.positive, default=1, help="rounds over all variants")
    add("--variants", type=types.names_of("variant", VARIANTS), default=VARIANTS,
        help=f"out of {', '.join(VARIANTS)}")  # fmt: skip
    add("--rings", type=_rings, default=(), help="for example 4x64x16,16x16x16")
    add("--keep", action="store_true", help="leave the files for the next time")
    options = parser.parse_args(arguments)
    if not options.device:
        import torch

        options.device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return options


def _rings(text: str) -> tuple[str, ...]:
    rings = tuple(text.split(","))
    for ring in rings:
        parts = ring.split("x")
        if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
            raise argparse.ArgumentTypeError(f"{ring!r} is not MIBxPIECESxTHREADS, as 4x64x16 is")
    return rings


def write_files(folder: Path, gib: float, count: int) -> list[Path]:
    """`count` files of random bf16 matrices, `gib` GiB together; those that are there already are kept."""
    import torch

    from trainer.modeling.tensor_file import write_tensors

    folder.mkdir(parents=True, exist_ok=True)
    each = int(gib * GIB) // count
    # a small file has several tensors too
    rows = max(1, min(TENSOR_BYTES, each // 4) // (2 * ROW))
    number = max(1, each // (2 * ROW * rows))
    generator = torch.Generator().manual_seed(0)
    distinct = [
        torch.randint(-(2**15), 2**15, (rows, ROW), dtype=torch.int16, generator=generator)
        for _ in range(min(DISTINCT_TENSORS, number))
    ]
    tensors = {
        f"blocks.{index:04}.weight": distinct[index % len(distinct)].view(torch.bfloat16)
        for index in range(number)
    } | {f"blocks.{index:04}.bias": torch.zeros(rows, dtype=torch.bfloat16) for index in range(number)}
    size = sum(tensor.nbytes for tensor in tensors.values())
    # no name that a model's own files have: they are written over, and removed at the end
    paths = [folder / f"bench-load-{index + 1:05}-of-{count:05}.safetensors" for index in range(count)]
    for path in paths:
        if not path.is_file() or not size < path.stat().st_size < size + MIB:
            write_tensors(path, tensors, {}, None)
    return paths


def prepare(paths: Sequence[Path], state: str) -> float | None:
    """Bring the files into the page cache or out of it; the share that is there then, None if untold."""
    from trainer.modeling.base.reading import page_cache_share

    if state == "cold":
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        if _share(paths, page_cache_share) != 0.0:
            drop_page_cache()
    elif _share(paths, page_cache_share) != 1.0:
        read_raw(paths, direct=False)
    share = _share(paths, page_cache_share)
    if share is None or (share > 0.05 if state == "cold" else share < 0.95):
        said = "unknown" if share is None else f"{share:.0%}"
        print(f"not {state}: the share in the page cache is {said}", file=sys.stderr, flush=True)
    return share


def drop_page_cache(setting: Path = Path("/proc/sys/vm/drop_caches")) -> None:
    """Have the kernel forget every file that is not in use; some keep files that a process asks it to forget.

    Only root may: of others the state is told as it is.
    """
    if os.access(setting, os.W_OK):
        setting.write_text("1")


def _share(paths: Sequence[Path], of: Callable[[Path], float | None]) -> float | None:
    shares = [share for path in paths if (share := of(path)) is not None]
    return round(statistics.mean(shares), 3) if len(shares) == len(paths) else None


def in_child(variant: str, state: str, paths: Sequence[Path], device: str) -> Measured:
    """`measure` in a new process. Raises HardwareError where that fails; what it said is on stderr."""
    files = [str(path.resolve()) for path in paths]
    ended = processes.call(job, {"variant": variant, "state": state, "paths": files, "device": device})
    if ended.code:
        raise HardwareError(
            f"{variant} could not read to {device} (exit code {ended.code})",
            where="--variants, --device",
            remedy="the lines above say why; leave it out by --variants, or choose another device",
        )
    return Measured(**ended.answer)


def job(variant: str, state: str, paths: Sequence[str], device: str) -> dict[str, Any]:
    """Call `measure` in the child; gives its fields."""
    return asdict(measure(variant, state, [Path(path) for path in paths], device))


def measure(variant: str, state: str, paths: Sequence[Path], device: str) -> Measured:
    """Read all files once in this process, which has read none yet."""
    import torch

    how: list[str] = []
    read, cuda = reader_of(variant, how.append), torch.device(device).type == "cuda"
    if cuda:
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
    with host_memory() as growth:
        started = time.perf_counter()
        kept = list(read(paths, device))
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    tensor_bytes = sum(tensor.nbytes for tensor in kept)
    assert variant.startswith("raw") or tensor_bytes > 0.99 * _size(paths), "not all of it was read"
    peak = torch.cuda.max_memory_reserved() / GIB if cuda else 0.0
    return Measured(
        variant=variant,
        state=state,
        gib_per_second=round(_size(paths) / GIB / seconds, 3),
        seconds=round(seconds, 3),
        host_growth_mib=round(growth["bytes"] / MIB, 1),
        device_peak_gib=round(peak, 2),
        how=how[0].partition(": ")[2] if how else "",
    )


Read = Callable[[Sequence[Path], str], Iterator[Any]]


def reader_of(variant: str, say: Callable[[str], None]) -> Read:
    """A function that yields every tensor of the files on the device; none where the disk alone is read."""
    from trainer.modeling.base.reading import Choice, ShardReader
    from trainer.modeling.base.ring import RingSize

    name, _, ring = variant.partition("@")
    if name.startswith("raw"):

        def raw(paths: Sequence[Path], device: str) -> Iterator[Any]:
            read_raw(paths, direct=name == "raw-direct")
            return iter(())

        return raw
    if name == "fastsafetensors":
        return lambda paths, device: read_fastsafetensors(paths, device, {})
    if name == "fastsafetensors-tuned":
        options = {"bbuf_size_kb": 256 * 1024, "max_threads": THREADS}
        return lambda paths, device: read_fastsafetensors(paths, device, options)
    choice = {
        "safetensors": Choice(method="safetensors", reason="bench"),
        "fastsafetensors-batched": Choice(method="fastsafetensors", reason="bench"),
        "direct": Choice(method="parallel", direct=True, reason="bench"),
        "buffered": Choice(method="parallel", reason="bench"),
        "auto": None,
    }[name]
    size = None
    if ring:
        piece_mib, pieces, threads = (int(part) for part in ring.split("x"))
        size = RingSize(piece_bytes=piece_mib * MIB, pieces=pieces, threads=threads)

    def read(paths: Sequence[Path], device: str) -> Iterator[Any]:
        chosen = None if choice is None else lambda path: choice
        with ShardReader(device, choice=chosen, size=size, say=say) as reader:
            for path in paths:
                with reader.open(path) as file:
                    for tensor in file.ends:
                        yield file.get_tensor(tensor)

    return read


def read_fastsafetensors(paths: Sequence[Path], device: str, options: Mapping[str, int]) -> Iterator[Any]:
    """The library as its documentation has it, a whole file at a time."""
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True, **options)
    for path in paths:
        loader.add_filenames({0: [str(path)]})
        buffers = loader.copy_files_to_device()
        for name in loader.get_keys():
            yield buffers.get_tensor(name)
        buffers.close()
        loader.reset()
    loader.close()


def read_raw(paths: Sequence[Path], *, direct: bool) -> None:
    """Read every byte into memory that is used again and again, by threads, without a device."""
    local = threading.local()

    def read(piece: tuple[int, int]) -> int:
        descriptor, offset = piece
        if "buffer" not in vars(local):
            local.buffer = mmap.mmap(-1, PIECE_BYTES)
        return os.preadv(descriptor, [local.buffer], offset)

    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    descriptors = [os.open(path, flags) for path in paths]
    pieces = [
        (descriptor, offset)
        for descriptor, path in zip(descriptors, paths, strict=True)
        for offset in range(0, path.stat().st_size, PIECE_BYTES)
    ]
    with ThreadPoolExecutor(THREADS) as threads:
        assert sum(threads.map(read, pieces)) == _size(paths), "a read ended early"
    for descriptor in descriptors:
        os.close(descriptor)


def _size(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


@contextlib.contextmanager
def host_memory() -> Iterator[dict[str, int]]:
    """A dict with `bytes`: how much this process's resident memory rose at most, mapped files included."""
    growth, start = {"bytes": 0}, _resident()

    def look() -> None:
        growth["bytes"] = max(growth["bytes"], _resident() - start)

    with processes.meanwhile(look, 0.01):
        yield growth


def _resident() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "RssShmem"))


def table(found: Sequence[Measured]) -> str:
    """Medians by variant, both states side by side."""
    lines = [f"{'variant':30} {'cold GiB/s':>11} {'cached GiB/s':>13} {'host +MiB':>10}  chosen when cold"]
    for variant in dict.fromkeys(measured.variant for measured in found):
        of = [measured for measured in found if measured.variant == variant]
        growth = max(measured.host_growth_mib for measured in of)
        rates = [rate(found, variant, state) for state in STATES]
        lines.append(f"{variant:30} {rates[0]:11.2f} {rates[1]:13.2f} {growth:10.0f}  {of[0].how}")
    return "\n".join(lines)


def rate(found: Sequence[Measured], variant: str, state: str) -> float:
    """Median GiB/s; 0 where it was not measured."""
    rates = [each.gib_per_second for each in found if (each.variant, each.state) == (variant, state)]
    return statistics.median(rates) if rates else 0.0


def verdict(found: Sequence[Measured]) -> str:
    """`auto` against what it has to reach."""
    raw = max(rate(found, name, "cold") for name in ("raw-direct", "raw-buffered"))
    cold, cached = (rate(found, "auto", state) for state in STATES)
    library_cold, library_cached = (rate(found, "safetensors", state) for state in STATES)
    if not all((raw, cold, cached, library_cold, library_cached)):
        return "no verdict: raw reads, safetensors and auto are needed for one"
    growth = max(measured.host_growth_mib for measured in found if measured.variant == "auto")
    rows = [
        ("cold against safetensors", cold / library_cold, 1.7),
        ("cold against the raw reads", cold / raw, 0.9),
        ("cached against safetensors", cached / library_cached, 1.0),
    ]
    lines = [
        f"{'ok  ' if is_ >= need else 'MISS'} {name}: {is_:.2f}, needed {need}" for name, is_, need in rows
    ]
    lines.append(f"{'ok  ' if growth < 1024 else 'MISS'} host memory: +{growth:.0f} MiB, allowed 1024")
    return "\n".join(lines)
