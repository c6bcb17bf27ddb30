"""A job started by a command: the environment and folders that it gets, and the state left afterwards."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trainer.cli import jobs, main, measure, places
from trainer.cli.options import Layers
from trainer.cli.targets import require_writable_folder
from trainer.config.launchers import Launch
from trainer.engine.probing import probe
from trainer.engine.spec import Job, Mode
from trainer.errors import ConfigError, StoppedError
from trainer.machine.facts import Facts
from trainer.machine.reading import read_recorded
from trainer.planning.plan import Plan
from trainer.planning.planning import plan_run
from trainer.telemetry.run_folder import tries
from trainer.telemetry.run_folder.tries import Try
from trainer.telemetry.supervising import supervisor

MACHINE = Path(__file__).parents[2] / "golden" / "machines" / "h200.json"
TEXT = """\
family: flux1_dev
data: {sets: [{img_dir: images}]}
output_dir: out
"""


@dataclass
class Seen:
    """Arguments of each call of the supervisor."""

    runtime_dirs: list[Path] = field(default_factory=list)
    specs: list[dict[str, Any]] = field(default_factory=list)
    environments: list[Mapping[str, str]] = field(default_factory=list)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Seen:
    """A supervisor that only reads what its child would, with a second command run meanwhile."""
    seen = Seen()

    def supervise(
        command: Sequence[str], *, runtime_dir: Path, environments: Sequence[Mapping[str, str]], **_: object
    ) -> int:
        seen.runtime_dirs.append(runtime_dir)
        seen.environments += environments
        assert runtime_dir.is_dir()
        if len(seen.runtime_dirs) == 1:
            start("train", "other")
        spec = json.loads(Path(command[-1]).read_text())
        assert spec["runtime_dir"] == str(runtime_dir)
        seen.specs.append(spec)
        return 75

    monkeypatch.setattr(supervisor, "supervise", supervise)
    monkeypatch.setenv("TRAINER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(TEXT, encoding="utf-8")
    return seen


def start(mode: Mode, output: str) -> int:
    loaded = Layers([Path("c.yaml")], ["model.weights=random"], None, Path(output)).load()
    facts = read_recorded(MACHINE)
    return jobs.run_job(loaded, facts, plan_run(loaded, facts), Job(mode=mode))


def test_a_second_command_leaves_the_first_ones_job_alone(seen: Seen, tmp_path: Path) -> None:
    assert start("train", "mine") == 75
    second, first = seen.specs
    assert first["config"]["output_dir"] == "mine"
    assert second["config"]["output_dir"] == "other"
    assert not list((tmp_path / "runtime").iterdir())


@pytest.mark.parametrize(
    ("mode", "shared"), [("train", True), ("cache", True), ("sample", False), ("verify", False)]
)
def test_only_runs_take_the_users_runtime_folder(
    seen: Seen, tmp_path: Path, mode: Mode, shared: bool
) -> None:
    start(mode, "mine")
    assert (seen.runtime_dirs[0] == tmp_path / "runtime") is shared
    assert not list((tmp_path / "runtime").iterdir())


def test_a_launcher_of_another_number_is_told_before_a_folder_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINER_RUNTIME_DIR", str(tmp_path / "runtime"))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    Path("c.yaml").write_text(TEXT, encoding="utf-8")
    assert main(["train", "c.yaml", "--gpus", "4"]) == 78
    said = "--gpus: parallel.gpus is 4, and the launcher started 2 (by WORLD_SIZE)"
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize("trouble", ["port", "address", "runtime folder", "output folder"])
def test_what_would_stop_the_start_is_told_before_kernels_are_measured(
    trouble: str,
    seen: Seen,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def planned(*_: object, **__: object) -> None:
        raise AssertionError("kernels would be measured")

    monkeypatch.setattr(measure, "planned", planned)
    runtime = Path("runtime")
    runtime.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other, (runtime / "lock").open("w") as lock:
        port = other.getsockname()[1] if trouble == "port" else 0
        monkeypatch.setenv("TRAINER_METRICS_PORT", str(port))
        if trouble == "address":
            monkeypatch.setenv("TRAINER_METRICS_ADDRESS", "everywhere")
        if trouble == "runtime folder":
            fcntl.flock(lock, fcntl.LOCK_EX)
        if trouble == "output folder":
            Path("out").write_text("a file")
        output = "out/run" if trouble == "output folder" else "out"
        assert main(["train", "c.yaml", "--set", "model.weights=random", "--output", output]) == 78
    said = {
        "port": f"TRAINER_METRICS_PORT: port {port} is in use by another process",
        "address": 'TRAINER_METRICS_ADDRESS: "everywhere" is not an address',
        "runtime folder": "is used by another run",
        "output folder": "a file stands where a folder would have to be made",
    }
    assert said[trouble] in capsys.readouterr().err


@pytest.mark.parametrize("target", ["disk/runs", "link"], ids=["not mounted", "loop"])
def test_an_output_below_a_link_that_leads_nowhere_is_told_before_anything_is_read(
    target: str, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(target)
    for output in (tmp_path / "link", tmp_path / "link/run"):
        with pytest.raises(ConfigError, match=f"the link link leads nowhere: to {target}") as told:
            require_writable_folder(output, "--output")
        assert told.value.problems[0].remedy == "mount what it leads to, or correct the link"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_before_the_start_ends_with_75(signum: signal.Signals) -> None:
    signal.signal(signum, signal.SIG_DFL)  # below `nohup make test` a hangup is ignored
    places.stop_before_start(Launch())
    with pytest.raises(StoppedError, match="before anything was started"):
        os.kill(os.getpid(), signum)


def test_no_after_without_a_lora(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "c.yaml", "--prompt", "a cat", "--before-after"]) == 78
    assert "no after without a LoRA" in capsys.readouterr().err
    assert not seen.specs


def test_an_empty_prompt_is_told_before_anything_is_started(
    seen: Seen, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", "c.yaml", "--prompt", "a cat", "--prompt", " "]) == 78
    assert "--prompt: an empty prompt" in capsys.readouterr().err
    assert not seen.specs


def test_a_full_fine_tune_is_given_by_its_run_or_its_model(
    seen: Seen, tiny_flux1_dev: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER__MODEL__PRETRAINED_MODEL_NAME_OR_PATH", str(tiny_flux1_dev))
    shutil.copytree(tiny_flux1_dev / "transformer", tmp_path / "run" / "model" / "transformer")
    for given in ("run", "run/model"):
        assert main(["sample", "c.yaml", "--prompt", "a cat", "--model", given, "--before-after"]) == 75
        assert seen.specs[-1]["model_folder"] == str(tmp_path / "run" / "model")
        assert seen.specs[-1]["before_after"] is True


def test_a_folder_without_the_familys_model_is_told(
    seen: Seen, tiny_flux1_dev: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sample", "c.yaml", "--prompt", "a cat", "--model"]
    (tmp_path / "run" / "lora").mkdir(parents=True)
    assert main([*words, "run"]) == 78
    told = capsys.readouterr().err
    assert "--model run: there are no weights of a transformer in it" in told
    shutil.copytree(tiny_flux1_dev / "transformer", tmp_path / "other" / "transformer")
    config = tmp_path / "other" / "transformer" / "config.json"
    config.write_text(config.read_text().replace("FluxTransformer2DModel", "QwenImageTransformer2DModel"))
    assert main([*words, "other"]) == 78
    assert "a QwenImageTransformer2DModel, and a FluxTransformer2DModel is needed" in capsys.readouterr().err
    save_file({"a.lora_B.weight": torch.ones(1)}, "one.safetensors")
    assert main([*words, "other", "--lora", "one.safetensors"]) == 78
    assert "a LoRA belongs to the base model, and this is another one" in capsys.readouterr().err
    assert not seen.specs


def test_a_try_says_what_is_drawn(
    seen: Seen, tiny_flux1_dev: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "run/tries/1"
    place.mkdir(parents=True)
    words = ["sample", "c.yaml", "--set", f"model.pretrained_model_name_or_path={tiny_flux1_dev}"]
    words += ["--try=run/tries/1"]
    assert main(words) == 65
    assert "name the folder of a try" in capsys.readouterr().err
    one = Try(prompts=("--set a=b", "a dog"), loras=("lora/run.safetensors",), seed=5, resolution=96)
    (place / tries.RECORD).write_text(tries.to_json(one))
    assert main(words) == 65
    assert "run.safetensors: cannot be read" in capsys.readouterr().err
    (tmp_path / "run/lora").mkdir()
    save_file({"a.lora_B.weight": torch.ones(1)}, "run/lora/run.safetensors", {"family": "llama"})
    assert main(words) == 65
    assert "a LoRA of llama" in capsys.readouterr().err
    save_file({"a.lora_B.weight": torch.ones(1)}, "run/lora/run.safetensors", {"family": "flux1_dev"})
    for more in (
        ["--prompt", "a"],
        ["--lora", "run/lora/run.safetensors"],
        ["--before-after"],
        ["--picture", "a.png"],
    ):
        assert main([*words, *more]) == 78
        assert "its try.json says what to draw" in capsys.readouterr().err
    assert not seen.specs
    assert main(words) == 75
    spec = seen.specs[-1]
    assert (spec["mode"], spec["try_folder"]) == ("sample", str(place))
    drawn = spec["config"]["validation"]
    assert (drawn["prompts"], drawn["seed"], drawn["resolution"]) == (["--set a=b", "a dog"], 5, 96)


FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Plan, Facts]:
    """A plan for an H200, with a cache folder that is still to be made."""
    for name in FOLDERS:  # torch sets one of them as it is imported
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAINER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(TEXT, encoding="utf-8")
    facts = read_recorded(MACHINE)
    return plan_run(Layers((Path("c.yaml"),), (), None, None).load(), facts), facts


def test_compilers_keep_what_they_make(
    planned: tuple[Plan, Facts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second start compiles nothing; a folder of the user's own, and a switch, stay."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    found = jobs.child_environment(*planned)
    folder = tmp_path / "cache" / "compile"
    assert found.items() >= planned[0].environment.items()
    assert [found[name] for name in FOLDERS] == [
        str(folder / "inductor"),
        "/mine",
        str(folder / "flash-attn-sm90"),
    ]
    assert found["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    assert jobs.child_environment(*planned)["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "0"


@pytest.mark.parametrize("visible", ["1,0", "GPU-00000000-0000-0000-0000-000000000002", "MIG-0"])
def test_which_gpus_are_visible_is_left_to_the_driver(
    planned: tuple[Plan, Facts], monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    """The variable goes to every rank as it is: peers must be visible to each, and a rank has a place among
    them.
    """
    plan, facts = planned
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    two = dataclasses.replace(plan, ranks=2, devices=(0, 2))
    ranks = jobs.rank_environments(jobs.child_environment(plan, facts), two)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in ranks] == [visible, visible]
    assert [one["LOCAL_RANK"] for one in ranks] == ["0", "2"]
    assert "CUDA_VISIBLE_DEVICES" not in {*plan.environment, *plan.rank_environment}


def test_accelerate_hears_nothing_of_launchers(
    planned: tuple[Plan, Facts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate would wait for processes that nobody started, or fail without their address."""
    ranks = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "16", "PMI_SIZE": "2"}
    others = {"MV2_COMM_WORLD_SIZE": "3", "ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_FSDP": "true"}
    for name, value in {**ranks, **others, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "7"}.items():
        monkeypatch.setenv(name, value)
    script = (
        "from accelerate import Accelerator; one = Accelerator(cpu=True); "
        "print(one.num_processes, one.process_index, one.mixed_precision, one.gradient_accumulation_steps)"
    )
    command = [sys.executable, "-c", script]
    environ = {**jobs.child_environment(*planned), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1", "0", "no", "1"], done.stderr


def test_a_compiler_keeps_to_its_own_folder_where_ours_cannot_be_made(
    planned: tuple[Plan, Facts], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """flash-attn 4 fails where it cannot write, and would be taken for a kernel that does not work."""
    file = tmp_path / "cache" / "compile" / "flash-attn-sm90"
    file.parent.mkdir(parents=True)
    file.write_text("", encoding="utf-8")
    found = jobs.child_environment(*planned)
    assert not [name for name in found if name.startswith("FLASH_ATTENTION")]
    assert found["TRITON_CACHE_DIR"] == str(file.parent / "triton")
    assert capsys.readouterr().err == f"{file} cannot be written (File exists): every start compiles anew\n"


def test_jobs_and_probes_have_these_folders(
    planned: tuple[Plan, Facts], seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("train", "run")
    assert seen.environments and all("TRITON_CACHE_DIR" in one for one in seen.environments)
    probed: list[Mapping[str, str]] = []

    def probe_none(
        names: object, shape: object, dtype: object, environ: Mapping[str, str], *, device: str
    ) -> probe.Probed:
        probed.append(environ)
        return probe.Probed(verdicts=())

    monkeypatch.setattr(probe, "probe", probe_none)
    loaded = Layers((tmp_path / "c.yaml",), (), None, None).load()
    unmeasured = dataclasses.replace(planned[1], verdicts=())
    measure.measure_kernels(loaded, unmeasured, planned[0], ["attention"], set())
    assert "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR" in probed[0]


@pytest.mark.parametrize("given", ["run", "run/lora"])
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "my-lora.safetensors"])
def test_a_run_and_the_folder_that_it_leaves_a_lora_in_name_its_file(
    name: str, given: str, seen: Seen, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run" / "lora"
    folder.mkdir(parents=True)
    words = ["sample", "c.yaml", "--prompt", "a cat", "--lora", str(tmp_path / given)]
    assert main(words) == 78
    assert "is a folder with 0 LoRA files" in capsys.readouterr().err
    for file in (name, "my-lora.comfyui.safetensors"):
        save_file({"a.lora_B.weight": torch.ones(1)}, folder / file, {"family": "llama"})
    assert main(words) == 65
    assert name in capsys.readouterr().err
    save_file({"a.lora_B.weight": torch.ones(1)}, folder / "another.safetensors")
    assert main(words) == 78
    assert not seen.specs
