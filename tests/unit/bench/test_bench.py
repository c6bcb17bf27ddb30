"""The package bench: figures from logs and traces, busy GPUs, records, and the page that comes of them."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import __main__ as bench
from bench import ours, page, processes, record, train
from bench.floor import Ceilings, Work, count_work, floor_milliseconds
from bench.processes import Ended
from bench.record import Record, Row
from tests.random_bases import build
from trainer import families
from trainer.cli.options import Layers
from trainer.errors import DataError, HardwareError
from trainer.families.values import Shape
from trainer.machine import idle
from trainer.machine.description import Machine
from trainer.machine.idle import Gpu
from trainer.planning.rules import judge
from trainer.telemetry import figures
from trainer.telemetry.measurement import Table
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics

REPOSITORY = Path(__file__).resolve().parents[3]
IDLE = "NVIDIA H200, 580.159.04, 143771, 4, 0\n"
BUSY = "NVIDIA H200, 580.159.04, 143771, 41733, 97\n"
UNIFIED = "NVIDIA GB10, 580.95.05, [N/A], [N/A], 0\n"
PROCESSES = "12041, /usr/bin/python3, 41220\n"

MACHINE = Machine(
    gpu="NVIDIA H200",
    gpu_gib=139.8,
    driver="580",
    torch="2.11.0",
    packages="",
    cpu_cores=16,
    architecture="x86_64",
    month="2026-11",
)


def row(variant: str = "ours-bf16", **changes: Any) -> Row:
    one = Row(
        variant=variant,
        family="flux1_dev",
        precision="bf16",
        settings="",
        resolution=1024,
        batch=2,
        rank=16,
        tokens=512,
    )
    return dataclasses.replace(one, **changes)


def record_of(*rows: Row) -> Record:
    return Record(title="Steps", text="Of a test.", machine=MACHINE, command="bench", rows=rows)


# figures of a run


def log_line(step: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1.0, "seconds_per_step": seconds} | more


def test_figures_are_those_of_the_last_steps(tmp_path: Path) -> None:
    lines = [
        {"step": 0, "validation_loss": 1.0},
        log_line(1, 9.0, device_memory_peak_bytes=3 << 30, device_memory_reserved_bytes=4 << 30),
        log_line(2, 0.25, device_memory_peak_bytes=5 << 30, device_memory_reserved_bytes=6 << 30),
        log_line(3, 0.5, loss=2.0, device_memory_peak_bytes=5 << 30, device_memory_reserved_bytes=2 << 30),
    ]
    log = tmp_path / METRICS_LOG
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "torn')
    assert figures.of_steps(read_metrics(log), 2) == {
        "times": [250.0, 500.0],
        "loss": 1.5,
        "allocated_gib": 5.0,
        "reserved_gib": 6.0,
    }


@pytest.mark.parametrize(
    "lines",
    [[log_line(1, 0.1)], [log_line(1, 0.1), log_line(4, 0.1)], [log_line(3, 0.1), log_line(4, 0.1)]],
    ids=["too few", "a line for three steps", "a resumed run"],
)
def test_a_log_that_lacks_steps_is_refused(lines: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="of which no two are 2 apart"):
        figures.of_steps(lines, 2)


def test_a_line_counts_for_each_of_its_steps() -> None:
    """Lines as the shipped files ask for: each tenth step, and the last one."""
    lines = [log_line(10, 9.0), log_line(20, 0.5, compute_seconds_per_step=0.4), log_line(21, 0.7)]
    found = figures.of_steps(lines, 11)
    assert found["times"] == [500.0] * 10 + [700.0] and found["computed"] == [400.0] * 10


def test_rounds_become_one_row() -> None:
    samples = [
        {"times": [100.0, 110.0, 120.0], "allocated_gib": 5.04, "host_gib": 1.0, "settings": "compiled"},
        {"times": [90.0, 130.0, 200.0], "allocated_gib": 5.16, "host_gib": 2.0},
    ]
    merged = record.merge(row(floor_milliseconds=57.5), samples)
    assert (merged.milliseconds, merged.fastest, merged.slowest, merged.steps) == (115.0, 90.0, 200.0, 6)
    assert merged.round_medians == (110.0, 130.0)
    assert merged.samples_per_second == pytest.approx(2 / 0.115, abs=0.01), "a step has two samples"
    assert (merged.allocated_gib, merged.host_gib, merged.settings) == (5.2, 2.0, "compiled")
    assert merged.share_of_floor == pytest.approx(0.5)
    assert record.merge(row(), [{"problem": "not installed"}]).problem == "not installed"
    assert record.merge(row(), [{"times": [1.0]}, {"problem": "exit code 71"}]).milliseconds is None


# the machine


def test_a_busy_gpu_is_refused() -> None:
    assert idle.why_busy(idle.parse_gpu(IDLE), idle.parse_processes("")) == []
    reasons = idle.why_busy(idle.parse_gpu(BUSY), idle.parse_processes(PROCESSES))
    assert reasons == [
        "process 12041 (/usr/bin/python3, 41220 MiB)",
        "41733 MiB are in use",
        "it is 97 % busy",
    ]


def test_a_gpu_that_tells_no_memory_is_judged_by_the_rest() -> None:
    gpu = idle.parse_gpu(UNIFIED)
    assert gpu.used_mib is None and idle.why_busy(gpu, []) == []
    assert idle.why_busy(dataclasses.replace(gpu, utilisation=40), []) == ["it is 40 % busy"]


def test_several_gpus_are_one_too_many() -> None:
    with pytest.raises(HardwareError, match="CUDA_VISIBLE_DEVICES"):
        idle.parse_gpu(IDLE + IDLE)


def test_waits_for_our_own_last_process_only() -> None:
    answers = [idle.parse_gpu(BUSY), idle.parse_gpu(BUSY), idle.parse_gpu(IDLE)]
    slept: list[float] = []

    def read() -> tuple[Gpu, list[str]]:
        return answers[len(slept)], []

    with pytest.raises(HardwareError, match="busy: 41733 MiB"):
        idle.require_idle(read=read, sleep=slept.append)
    idle.require_idle(patience=30.0, read=read, sleep=slept.append)
    assert len(slept) == 2


def test_the_command_refuses_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def busy() -> None:
        raise HardwareError("the GPU is busy: it is 97 % busy")

    def run(*_: object, **__: object) -> dict[str, Any]:
        raise AssertionError("nothing may be started")

    monkeypatch.setattr(idle, "require_gpu", lambda **_: None)
    monkeypatch.setattr(idle, "require_idle", busy)
    monkeypatch.setattr(train, "run_variant", run)
    assert bench.main(["train", "flux1_dev", "--base", "assets/tiny-flux"]) == 69
    assert "the GPU is busy" in capsys.readouterr().err


# configuration and data of our runs


def small_job(family: str, base: Path, tokens: int) -> ours.Job:
    return ours.Job(
        family=family,
        base=base,
        resolution=64,
        batch=1,
        rank=4,
        tokens=tokens,
        steps=2,
        warmup=1,
        overrides=(),
    )


def test_runs_side_by_side_have_servers_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[int] = []

    def child(command: list[str], environ: Mapping[str, str], log: Path, *, cwd: Path) -> Ended:
        given.append(int(environ["TRAINER_METRICS_PORT"]))
        return Ended(code=1, host_gib=0.0, said="no\n")

    monkeypatch.setattr(processes, "run", child)
    held: list[socket.socket] = []
    for number in range(3):
        found = ours.train(small_job("flux1_dev", tmp_path, 8), "ours", tmp_path / str(number), tmp_path)
        assert found == {"problem": "exit code 1"}
        held.append(socket.create_server(("127.0.0.1", given[-1])))
    assert 0 not in given and len(set(given)) == 3
    for one in held:
        one.close()


@pytest.mark.parametrize("family", families.names())
def test_every_family_takes_the_layer(family: str, tmp_path: Path) -> None:
    tokens = 64
    data_set = ours.write_data_set(family, tmp_path / "data", resolution=64, tokens=tokens)
    job = small_job(family, tmp_path / "base", tokens)
    for variant in ours.OURS:
        content = ours.layer(job, variant, data_set, tmp_path / "cache")
        (tmp_path / "layer.yaml").write_text(yaml.safe_dump(content))
        loaded = Layers(ours.configs(job, tmp_path), output=tmp_path / "run").load()
        judge(families.get(family), loaded)
        config = loaded.config
        assert (config.train.max_train_steps, config.train.log_every_steps) == (3, 1)
        assert config.validation.every_steps > 3 and not config.validation.prompts
    for path in (tmp_path / "data").rglob("*.txt"):
        assert len(path.read_text().split()) > tokens, "a caption must fill its tokens"


# the command line


def test_the_recorded_command_names_no_folder_of_this_machine() -> None:
    given = ["flux1_dev", "--base", "/home/me/base", "--record", "/tmp/x.json", "--set", "a.b=[1, 2]"]
    said = "python -m bench train flux1_dev --base BASE --record FILE --set 'a.b=[1, 2]'"
    assert train.recorded_command(given) == said
    assert train.recorded_command(["flux1_dev", "--base=/home/me/base", *given[3:]]) == said


def test_an_unknown_variant_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.parser().parse_args(["flux1_dev", "--base", ".", "--variants", "ours-bf16,axolotl"])
    assert "no variant axolotl" in capsys.readouterr().err


def test_commands_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in bench.COMMANDS)
    assert bench.main(["trian"]) == 2
    assert "no command 'trian'" in capsys.readouterr().err


# the floor


def test_floor_counts_linear_layers_twice_and_attention_three_and_a_half_times() -> None:
    rates = Ceilings(bf16=500.0, fp8=1000.0, attention=100.0)
    work = Work(linear=50.0, attention=2.0)
    assert floor_milliseconds(work, "bf16", rates) == pytest.approx(200.0 + 70.0)
    assert floor_milliseconds(work, "fp8", rates) == pytest.approx(100.0 + 70.0)


@pytest.mark.slow
def test_counted_work_of_the_full_model(tmp_path: Path) -> None:
    build("flux1_dev", "full", tmp_path / "base", weights=False)
    shape = Shape(batch_size=1, width=1024, height=1024, text_tokens=512, bytes_per_value=2)
    work = count_work(families.get("flux1_dev"), tmp_path / "base", shape)
    assert work.linear == pytest.approx(59.5, rel=0.01)
    blocks, heads, width, tokens = 19 + 38, 24, 128, 4096 + 512
    assert work.attention == pytest.approx(4e-12 * blocks * heads * width * tokens**2, rel=1e-6)


# records and the page


def test_records_survive_their_file() -> None:
    one = record_of(row(milliseconds=1.0, round_medians=(1.0, 1.5)), row("torchao", problem="not installed"))
    text = record.to_json(one)
    assert record.from_json(text, "x.json") == one
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"
    with pytest.raises(DataError, match=r"x\.json: it is not a record"):
        record.from_json('{"rows": []}', "x.json")


def test_page_is_current() -> None:
    notes = (record.FOLDER / "notes.md").read_text(encoding="utf-8")
    records = record.read_records()
    assert page.PAGE.read_text(encoding="utf-8") == page.page(records, notes), "run: make docs"
    for stem in (stem for stem, one in records.items() if page.plotted(one)):
        missing = [name for name in page.plot_names(stem) if not (page.IMAGES / name).is_file()]
        assert not missing, "run: make docs"


def test_page_shows_what_was_measured_and_nothing_empty() -> None:
    ours_row = row(
        milliseconds=300.4, fastest=298.0, slowest=305.0, allocated_gib=42.0, floor_milliseconds=251.0
    )
    others = row("diffusers", milliseconds=751.0, fastest=750.0, slowest=760.0, allocated_gib=24.7)
    text = page.page(
        {"a": record_of(ours_row, others, row("torchao", problem="not installed"))}, f"x {page.MARK} y"
    )
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == (
        "| variant | frozen layers multiply in | ms/step (fastest to slowest) | peak GiB allocated "
        "| floor, ms | floor/time | faster than diffusers by |"
    )
    assert lines[2] == "| ours-bf16 | bf16 | 300 (298 to 305) | 42.0 | 251 | 83.6 % | 2.50x |"
    assert lines[4] == "| torchao | bf16 | not installed |  |  |  |  |"
    assert "(1,024 px, batch 2, rank 16, 512 text tokens)" in text
    assert "images/bench-a-time.png" in text and text.endswith(" y")


def test_rounds_that_disagree_are_told() -> None:
    agreeing, apart = row(round_medians=(100.0, 101.0)), row("compiled", round_medians=(100.0, 120.0))
    text = page.page({"a": record_of(agreeing, apart)}, page.MARK)
    assert "differ by more than 3 %: compiled 100, 120 ms." in text


def test_tables_of_other_commands_are_printed_as_they_are() -> None:
    table = Table(
        title="Loading",
        text="",
        machine=MACHINE,
        command="bench load",
        columns=("loader", "GiB/s"),
        rows=(("safetensors", "1.8"),),
    )
    read = record.from_json(record.to_json(table), "x.json")
    assert read == table
    assert "| loader | GiB/s |\n| --- | --- |\n| safetensors | 1.8 |" in page.page({"load": table}, page.MARK)


def test_notes_without_a_place_for_the_records_are_refused() -> None:
    with pytest.raises(DataError, match="has no line"):
        page.page({}, "# Measurements\n")


def test_the_command_writes_the_same_files_again(tmp_path: Path) -> None:
    """Pictures of every kind; tests of the plots draw those of all records."""

    def written() -> Mapping[str, bytes]:
        arguments = [
            "page",
            "--records",
            str(fewer),
            "--output",
            str(made / "page.md"),
            "--images",
            str(made),
        ]
        assert bench.main(arguments) == 0
        return {path.name: path.read_bytes() for path in made.iterdir()}

    made, fewer = tmp_path / "made", tmp_path / "records"
    made.mkdir()
    assert bench.main(["page", "--output", str(made / "page.md"), "--no-plots"]) == 0
    assert (made / "page.md").read_bytes() == page.PAGE.read_bytes()
    shutil.copytree(record.FOLDER, fewer)
    for stem in [stem for stem, one in record.read_records().items() if page.plotted(one)][1:]:
        (fewer / f"{stem}.json").unlink()
    first = written()
    assert first == written()
    kinds = {name.removesuffix(".png").rpartition("-")[2] for name in first if name.endswith(".png")}
    assert kinds == {"time", "memory", "losses", "scaling"}


@pytest.mark.slow
def test_ours_beside_diffusers_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_PROFILE", "cpu")
    monkeypatch.setenv("TRAINER_METRICS_PORT", "0")
    command = "train flux1_dev --base assets/tiny-flux --variants ours-eager,diffusers --resolution 64"
    command += f" --tokens 16 --steps 2 --warmup 1 --rounds 1 --record {tmp_path / 'a.json'}"
    arguments = [sys.executable, "-m", "bench", *command.split()]
    done = subprocess.run(arguments, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {one["variant"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert all(not one["problem"] and one["steps"] == 2 for one in rows.values()), done.stderr
    assert "checkpointing" in rows["ours-eager"]["settings"] and rows["ours-eager"]["host_gib"] > 0.1
    read: Callable[[Path], Mapping[str, Any]] = record.read_records
    assert [one.variant for one in read(tmp_path)["a"].rows] == ["ours-eager", "diffusers"]
