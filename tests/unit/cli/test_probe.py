"""`trainer probe`, the first screen of the appliance: readable lines on stdout, and JSON for machines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.cli.test_preflight import CONFIG, MISNAMED, mounts
from tests.unit.planning.conftest import machine
from trainer.cli import main
from trainer.cli import surroundings as module
from trainer.files import codec
from trainer.machine.facts import Facts, ReadVerdict, facts_from_json

Screen = Callable[..., tuple[int, str]]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Screen:
    """screen(facts, *words, image=..., NAME=value): exit code and stdout of `trainer probe WORDS`."""
    for name in ("UNIFIED_MEMORY", "DISABLE_CPU_OFFLOAD", "LD_LIBRARY_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAINER_CACHE_DIR", str(tmp_path / "cache"))

    def run(facts: Facts, *words: str, image: bool = False, **variables: str) -> tuple[int, str]:
        path = tmp_path / "facts.json"
        path.write_text(codec.to_json(facts))
        monkeypatch.setenv("TRAINER_FACTS", str(path))
        monkeypatch.setattr(module, "IMAGE", tmp_path if image else tmp_path / "none")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        code = main(["probe", *words])
        captured = capfd.readouterr()
        assert captured.err == ""
        return code, captured.out

    return run


def test_a_machine_and_how_to_go_on(screen: Screen) -> None:
    code, out = screen(machine("rtx-4090"))
    assert code == 0
    assert out.startswith("machine   x86_64, ")
    assert "\nGPU       NVIDIA GeForce RTX 4090, compute capability 8.9, " in out
    assert "\nprofile   rtx-4090: " in out and "\ncan       train in bf16 and fp16; " in out
    assert "a run would stop here" not in out
    assert out.endswith("trainer families          the models that can be trained\n")
    assert "/output" not in out and "docker" not in out


@pytest.mark.parametrize("image", [False, True])
def test_what_would_stop_a_run_is_told_first_of_all_that_follows(
    screen: Screen, image: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts(monkeypatch, tmp_path, ("/output", "/home/me/output"))
    code, out = screen(machine("driver-550-cuda-13-torch"), image=image)
    assert code == 0
    assert "a run would stop here:\nerror: this hardware cannot do it (exit code 69)\ndriver 550" in out
    assert ('docker run --rm --gpus all --user "$(id -u):0" -v' in out) is image
    assert ("/output   mounted: runs: checkpoints" in out) is image
    assert f"IMAGE train {tmp_path}/train_configs/flux1_dev_lora.yaml" in out or not image


def test_rates_of_both_readers_are_printed(screen: Screen) -> None:
    rates = (("parallel", "cold", 3.1), ("fastsafetensors", "cold", 1.8), ("parallel", "cached", 7.5))
    readings = tuple(
        ReadVerdict(disk="ext4 /models", loader=loader, state=state, gib_per_second=rate)
        for loader, state, rate in rates
    )
    _, out = screen(dataclasses.replace(machine("h200"), readings=readings))
    assert (
        "\nreading from ext4 /models, cold: parallel 3.10 GiB/s, fastsafetensors 1.80 GiB/s"
        "\nreading from ext4 /models, cached: parallel 7.50 GiB/s\n"
    ) in out


def test_a_misnamed_profile(screen: Screen) -> None:
    code, out = screen(machine("rtx-4090"), TRAINER_PROFILE="rtx4080")
    assert code == 0
    assert f"a run would stop here:\n{MISNAMED}" in out
    assert "TRAINER_PROFILE=rtx4080 does not fit, see below" in out


def test_on_a_cpu_no_gpu_is_asked_for(screen: Screen) -> None:
    assert "--gpus" not in screen(machine("cpu"), image=True, TRAINER_PROFILE="cpu")[1]


def test_facts_that_cannot_be_read_are_told_with_their_code(
    screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    screen(machine("cpu"))
    monkeypatch.setenv("TRAINER_FACTS", str(tmp_path / "absent.json"))
    assert main(["probe"]) == 78
    assert "the facts file cannot be read: No such file or directory" in capfd.readouterr().out


def test_machines_read_json(screen: Screen) -> None:
    facts = machine("h200")
    code, out = screen(facts, "--json")
    assert code == 0 and facts_from_json(out, "stdout") == facts
    assert json.loads(out)["gpus"][0]["name"] == "NVIDIA H200"


def test_the_toolkit_is_found(screen: Screen, tmp_path: Path) -> None:
    (tmp_path / "cuda-12.8" / "bin").mkdir(parents=True)
    (tmp_path / "cuda").symlink_to(tmp_path / "cuda-12.8")
    assert "toolkit   none, and none is needed\n" in screen(machine("h200"), CUDA_HOME=f"{tmp_path}/cuda")[1]
    (tmp_path / "cuda" / "bin" / "nvcc").touch()
    _, out = screen(machine("h200"), CUDA_HOME=f"{tmp_path}/cuda")
    assert f"toolkit   CUDA 12.8 in {tmp_path}/cuda, which training does not use\n" in out


def test_a_configuration_that_is_wrong_is_told_as_everywhere(
    screen: Screen, capfd: pytest.CaptureFixture[str]
) -> None:
    screen(machine("h200"))
    assert main(["probe", CONFIG, "--set", "lora.rnk=4"]) == 78
    assert "lora.rnk" in capfd.readouterr().err
