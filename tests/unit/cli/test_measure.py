"""Measuring before a run: the settings measured, the verdicts kept, and refusals that lift a kept verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.tiny import build_tiny
from tests.unit.planning.conftest import machine
from trainer.cli import main, measure
from trainer.cli.options import Layers
from trainer.config.hosts import Hosts
from trainer.config.reading.load import Loaded
from trainer.engine.probing import probe, reading
from trainer.engine.probing.child import Measured
from trainer.engine.probing.probe import Probed
from trainer.errors import HardwareError
from trainer.families.values import AttentionShape
from trainer.machine.facts import Facts, KernelVerdict, LinkVerdict, ReadVerdict
from trainer.machine.verdicts import FILE_NAME, read_kept_of_all
from trainer.planning import planning
from trainer.planning.planning import plan_run

TEXT = "family: flux1_dev\ndata: {sets: [{img_dir: images}]}\noutput_dir: out\nmodel: {weights: random}\n"
WORKS = Measured(milliseconds=1.0, errors={"output": 0.001})
Answer = Callable[[str, AttentionShape, str], KernelVerdict]


class Machine:
    """An H200 whose kernels do what `answer` says; `asked` are those that were measured, with their types."""

    def __init__(self, cache: Path) -> None:
        self.facts = dataclasses.replace(machine("h200"), verdicts=())
        self.asked: list[tuple[str, str]] = []
        self.answer: Answer = lambda name, shape, dtype: probe.judge(name, shape, WORKS, dtype)
        self.unsettled, self.device = False, "cuda:0"
        self.accidents = 0
        self._file = cache / FILE_NAME

    def read(self) -> Facts:
        kept = read_kept_of_all(self._file, self.facts)
        return dataclasses.replace(
            self.facts, verdicts=kept.verdicts, readings=kept.readings, links=kept.links
        )

    def probe(
        self, kernels: Sequence[str], shape: AttentionShape, dtype: str, *_: object, device: str
    ) -> Probed:
        assert device == self.device
        self.asked += [(name, dtype) for name in kernels]
        rows = tuple(self.answer(name, shape, dtype) for name in kernels)
        bad = tuple(row for row in rows if not row.works)
        good = tuple(row for row in rows if row.works)
        return Probed(verdicts=good, unsettled=bad) if self.unsettled else Probed(verdicts=rows)


def fails(name: str, shape: AttentionShape, dtype: str) -> KernelVerdict:
    return probe.judge(name, shape, Measured(milliseconds=1.0, errors={"output": 1.0}), dtype)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    found = Machine(tmp_path / "cache")
    monkeypatch.setattr(probe, "probe", found.probe)
    monkeypatch.setattr(probe, "_installed", lambda name: True)
    monkeypatch.setattr(planning, "machine_facts", found.read)
    monkeypatch.setattr(planning, "prepare_base", lambda loaded: None)  # nothing is downloaded here
    monkeypatch.setenv("TRAINER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(TEXT)
    return found


def config(*values: str) -> Loaded:
    return Layers([Path("c.yaml")], values, None, None).load()


@pytest.mark.parametrize(
    ("features", "measured"),
    [
        ({}, {"attention", "matmul"}),
        ({"attention": "flash"}, {"matmul"}),
        ({"compute": "bf16"}, {"attention"}),
        ({"attention": "flash", "compute": "bf16"}, set()),
    ],
)
def test_what_the_plan_leaves_open_is_measured_once(
    features: dict[str, str], measured: set[str], gpu: Machine
) -> None:
    loaded = config(*(f"features.{name}={value}" for name, value in features.items()))
    found, plan = measure.planned(loaded, probe=True)
    assert {name.partition(".")[0] for name, _ in gpu.asked} == measured
    assert ("attention.cudnn" in {row.kernel for row in found.verdicts}) == ("attention" in measured)
    assert {row.kernel for row in found.verdicts} >= {name for name, _ in gpu.asked}
    gpu.asked.clear()
    assert measure.planned(loaded, probe=True)[1] == plan
    assert gpu.asked == []
    assert measure.planned(loaded, probe=False)[1] == plan


def test_kernels_that_fail_in_fp16_leave_bf16_alone(gpu: Machine) -> None:
    gpu.answer = lambda name, shape, dtype: (
        fails(name, shape, dtype) if dtype == "fp16" else probe.judge(name, shape, WORKS, dtype)
    )
    with pytest.raises(HardwareError, match="no attention kernel works here"):
        measure.planned(config("model.dtype=fp16"), probe=True)
    plan = measure.planned(config(), probe=True)[1]
    assert (plan.dtype, plan.attention) == ("bf16", "flash")


def test_a_run_that_kept_verdicts_refuse_is_measured_again(
    gpu: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.answer = fails
    with pytest.raises(HardwareError):
        measure.planned(config(), probe=True)
    assert all(not row.works for row in gpu.read().verdicts)
    with pytest.raises(HardwareError) as refused:
        plan_run(config(), gpu.read())
    gpu.answer = lambda name, shape, dtype: probe.judge(name, shape, WORKS, dtype)
    found, plan = measure.planned(config(), probe=True)
    assert plan.attention == "flash" and all(row.works for row in found.verdicts)
    assert "no attention kernel works here" in capsys.readouterr().err
    # and so do both remedies that the refusal names
    assert "`trainer probe CONFIG` measures again; features.attention: native" in str(refused.value)


def test_remedies_of_the_refusal_help(gpu: Machine) -> None:
    gpu.answer = fails
    assert main(["probe", "c.yaml"]) == 0, "the command that measures ends well whatever it measures"
    with pytest.raises(HardwareError):
        measure.planned(config(), probe=True)
    assert measure.planned(config("features.attention=native"), probe=True)[1].attention == "native"
    gpu.answer = lambda name, shape, dtype: probe.judge(name, shape, WORKS, dtype)
    assert main(["probe", "c.yaml"]) == 0
    assert measure.planned(config(), probe=False)[1].attention == "flash"


def test_the_command_measures_what_works_anew_too(gpu: Machine) -> None:
    measure.planned(config(), probe=True)
    before = {name for name, _ in gpu.asked}
    gpu.asked.clear()
    faster = dataclasses.replace(WORKS, milliseconds=0.5)
    gpu.answer = lambda name, shape, dtype: probe.judge(name, shape, faster, dtype)
    assert main(["probe", "c.yaml"]) == 0
    assert {name for name, _ in gpu.asked} == before
    assert {row.milliseconds for row in gpu.read().verdicts} == {0.5}


def test_what_is_not_about_the_kernel_is_told_and_forgotten(
    gpu: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.answer, gpu.unsettled = fails, True
    plan = measure.planned(config(), probe=True)[1]
    assert plan.attention == "flash", "as where nothing was measured"
    assert gpu.read().verdicts == ()
    assert len(gpu.asked) == len(set(gpu.asked)), "once a start"
    said = capsys.readouterr().err
    assert "attention.cudnn: not measured, and tried again at the next start: relative error" in said


def test_a_failure_that_was_kept_gives_way_to_one_that_says_nothing(gpu: Machine) -> None:
    gpu.answer = fails
    with pytest.raises(HardwareError):
        measure.planned(config(), probe=True)
    gpu.unsettled = True
    assert measure.planned(config(), probe=True)[1].attention == "flash"


def test_fp8_that_was_asked_for_and_failed_is_measured_again(gpu: Machine) -> None:
    asked = config("features.compute=fp8")
    gpu.answer = lambda name, shape, dtype: (
        fails(name, shape, dtype) if name == "matmul.fp8" else probe.judge(name, shape, WORKS, dtype)
    )
    measure.planned(config(), probe=True)
    with pytest.raises(HardwareError, match="the probe saw FP8 failing"):
        measure.planned(asked, probe=True)
    gpu.answer = lambda name, shape, dtype: probe.judge(name, shape, WORKS, dtype)
    assert measure.planned(asked, probe=True)[1].compute == "fp8"


def test_the_disk_of_the_base_is_measured_once_and_decides(
    gpu: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = gpu.facts
    gpu.facts = dataclasses.replace(facts, packages={**facts.packages, "fastsafetensors": "0.5.0"})
    build_tiny("flux1_dev", tmp_path / "base")
    asked: list[Path] = []
    rates = {"parallel": 2.0, "fastsafetensors": 3.0}

    def instead(
        file: Path, disk: str, environ: object, *, device: str
    ) -> tuple[tuple[ReadVerdict, ...], str]:
        assert device == "cuda:0"
        asked.append(file)
        rows = (
            ReadVerdict(disk=disk, loader=loader, state="cold", gib_per_second=rate)
            for loader, rate in rates.items()
        )
        return tuple(rows), ""

    monkeypatch.setattr(reading, "probe_reading", instead)
    monkeypatch.setattr(reading, "LEAST_BYTES", 1)
    base = f"model.pretrained_model_name_or_path={tmp_path / 'base'}"
    written = ("model.weights=pretrained", base, "data.max_sequence_length=16", "data.resolution=64")
    for _ in range(2):
        plan = measure.planned(config(*written), probe=True)[1]
        assert plan.loader == "fastsafetensors-cold"
    (file,) = asked
    assert file.is_relative_to(tmp_path / "base" / "transformer")
    assert "fastsafetensors, cold: 3.00 GiB/s" in capsys.readouterr().err
    assert (
        measure.planned(config(*written, "features.loader=safetensors"), probe=True)[1].loader
        == "safetensors"
    )
    rates["fastsafetensors"] = 1.0
    settings = [word for value in written for word in ("--set", value)]
    assert main(["probe", "c.yaml", *settings]) == 0
    assert len(asked) == 2, "the command measures again"
    assert measure.planned(config(*written), probe=False)[1].loader == "auto"


def test_verdicts_of_an_earlier_version_are_dropped_with_a_word(
    gpu: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Verdicts of older versions name no type: those of an fp16 run counted for bf16 too."""
    gpu.answer = fails
    with pytest.raises(HardwareError):
        measure.planned(config(), probe=True)
    file = tmp_path / "cache" / FILE_NAME
    file.write_text("\n".join(line for line in file.read_text().splitlines() if '"dtype"' not in line))
    gpu.answer = lambda name, shape, dtype: probe.judge(name, shape, WORKS, dtype)
    capsys.readouterr()
    assert measure.planned(config(), probe=True)[1].attention == "flash"
    assert "kernels of an earlier version, whose type is not known, are forgotten" in capsys.readouterr().err
    assert "dtype" in file.read_text()
    gpu.asked.clear()
    measure.planned(config(), probe=True)
    assert gpu.asked == []


def test_kernels_are_measured_on_the_kind_of_gpu_that_the_run_takes(gpu: Machine) -> None:
    """The H200 is visible second: what is measured there is kept as its own, not as the other's."""
    alone, other = gpu.facts, machine("rtx-4090").gpu
    gpu.facts, gpu.device = dataclasses.replace(alone, gpus=(other, *alone.gpus)), "cuda:1"
    found, plan = measure.planned(config(), probe=True)
    assert (plan.devices, plan.attention) == ((1,), "flash")
    assert {row.gpu for row in found.verdicts} == {"NVIDIA H200"}
    gpu.asked.clear()
    assert measure.planned(config(), probe=True) == (found, plan)
    gpu.facts, gpu.device = alone, "cuda:0"
    assert {row.gpu for row in measure.planned(config(), probe=True)[0].verdicts} == {""}
    assert gpu.asked == [], "kept by the GPU's name"
    gpu.facts = dataclasses.replace(alone, gpus=(other,))
    measure.planned(config(), probe=True)
    assert gpu.asked


@pytest.fixture
def pair(gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Two H200; the devices of each time that the way between them is measured."""
    gpu.facts = dataclasses.replace(gpu.facts, gpus=gpu.facts.gpus * 2)
    asked: list[Sequence[str]] = []

    def probe_link(
        devices: Sequence[str], environ: Mapping[str, str], visible: str
    ) -> tuple[bool, LinkVerdict]:
        assert "WORLD_SIZE" not in environ
        asked.append(devices)
        return len(asked) > gpu.accidents, dataclasses.replace(LINK, gpus=len(devices), visible=visible)

    monkeypatch.setattr(measure, "probe_link", probe_link)
    monkeypatch.setenv("WORLD_SIZE", "1")  # of a launcher that started this process
    return asked


LINK = LinkVerdict(gpus=2, works=True, gib_per_second=341.0, exchange_ms=0.5, reason="right")


def test_the_way_between_gpus_is_measured_once(gpu: Machine, pair: list[Sequence[str]]) -> None:
    asked, placed = (
        config("train.gradient_accumulation_steps=2", "parallel.gpus=2"),
        dataclasses.replace(LINK, places=(0, 1)),
    )
    found, plan = measure.planned(asked, probe=True)
    assert pair == [["cuda:0", "cuda:1"]] and found.link == placed
    assert any("and it fits" in row.reason for row in plan.decisions if row.feature == "shard")
    assert measure.planned(asked, probe=True)[0].link == placed
    assert measure.planned(asked, probe=False)[0].link == placed
    assert len(pair) == 1
    assert main(["probe", "c.yaml"]) == 0
    assert len(pair) == 2, "the command that measures measures anew"


def test_gpus_that_others_use_are_left_alone(gpu: Machine, pair: list[Sequence[str]]) -> None:
    """Measuring takes memory of them, and time of who works there."""
    one = gpu.facts.gpus[0]
    busy = dataclasses.replace(one, free_memory_bytes=one.total_memory_bytes // 2)
    gpu.facts = dataclasses.replace(gpu.facts, gpus=(busy, one, busy, one))
    found = measure.measure_links(config(), gpu.facts)
    assert pair == [["cuda:1", "cuda:3"]]
    assert found.on((1, 3)).link == LINK
    assert all(found.on(others).link is None for others in ((0, 2), (1, 2), (0, 1, 2)))
    measure.measure_links(config(), found)
    measure.measure_links(config(), dataclasses.replace(found, gpus=(busy, one)))
    assert len(pair) == 1, "a verdict on these, and one alone"
    kept = dataclasses.replace(found, gpus=(one, busy, one, busy))
    measure.measure_links(config(), kept)
    assert pair[1:] == [["cuda:0", "cuda:2"]], "none on this pair"
    whole = measure.measure_links(config(), found.idle())
    assert pair[2:] == [["cuda:0", "cuda:1", "cuda:2", "cuda:3"]], "none on so many"
    measure.measure_links(config(), dataclasses.replace(whole, gpus=kept.gpus))
    assert len(pair) == 3, "these are among those"


def test_verdicts_of_before_and_damaged_ones_are_measured_again(
    gpu: Machine, pair: list[Sequence[str]], tmp_path: Path
) -> None:
    measure.measure_links(config(), gpu.facts)
    file = tmp_path / "cache" / "verdicts.json"
    kept = file.read_text()
    assert '"places"' in kept
    for damaged in (
        kept.replace('"places"', '"place"'),
        kept.replace('"links": [', '"links": [3, "places",'),
    ):
        assert damaged != kept
        file.write_text(damaged)
        found = gpu.read().links
        assert len(found) == (1 if "[3," in damaged else 0)


def test_a_pair_is_measured_where_more_failed_together(gpu: Machine, pair: list[Sequence[str]]) -> None:
    one = gpu.facts.gpus[0]
    busy = dataclasses.replace(one, free_memory_bytes=one.total_memory_bytes // 2)
    failed = dataclasses.replace(LINK, gpus=3, places=(0, 1, 2), works=False)
    facts = dataclasses.replace(gpu.facts, gpus=(one, one, busy), links=(failed,))
    assert measure.measure_links(config(), facts).on((0, 1)).link == LINK
    assert pair == [["cuda:0", "cuda:1"]]
    measure.measure_links(config(), facts.idle())
    assert len(pair) == 1, "the three together are known"


def test_the_command_measures_gpus_in_use_where_there_are_no_others(
    gpu: Machine, pair: list[Sequence[str]]
) -> None:
    one = gpu.facts.gpus[0]
    busy = dataclasses.replace(one, free_memory_bytes=one.total_memory_bytes // 2)
    facts = dataclasses.replace(gpu.facts, gpus=(busy, busy))
    measure.measure_links(config(), facts)
    assert pair == []
    measure.measure_links(config(), facts, anew=True)
    assert pair == [["cuda:0", "cuda:1"]]


def test_a_full_fine_tune_on_a_written_number_measures_the_way_for_its_time(
    gpu: Machine, pair: list[Sequence[str]]
) -> None:
    asked = config("method=full", "parallel.gpus=2", "train.gradient_accumulation_steps=2")
    assert measure.measure_links(asked, gpu.facts).link == dataclasses.replace(LINK, places=(0, 1))
    hosts = Hosts(count=2, address="host0", source="TRAINER_NODES")
    measure.measure_links(dataclasses.replace(asked, hosts=hosts), gpu.facts, anew=True)
    assert len(pair) == 1, "the way between hosts is another one"


@pytest.mark.parametrize("changes", [["parallel.gpus=1"], ["method=full"]])
def test_a_run_on_one_gpu_measures_no_way(
    gpu: Machine, pair: list[Sequence[str]], changes: Sequence[str]
) -> None:
    measure.planned(config(*changes), probe=True)
    assert pair == []


def test_an_accident_is_no_verdict_on_the_way(
    gpu: Machine, pair: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.accidents = 1
    assert measure.planned(config(), probe=True)[0].link is None
    assert "tried again at the next start" in capsys.readouterr().err
    assert measure.planned(config(), probe=True)[0].link == dataclasses.replace(LINK, places=(0, 1))
    assert len(pair) == 2
