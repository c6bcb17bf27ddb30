"""Answers to the entrypoint on recorded machines: message and exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.planning.conftest import MACHINES, machine, with_gpu
from trainer.cli import main, other_hosts
from trainer.cli import surroundings as module
from trainer.cli.commands import COMMANDS
from trainer.cli.jobs import child_environment
from trainer.cli.options import Layers
from trainer.config.hosts import Hosts
from trainer.files import codec
from trainer.machine.facts import Facts
from trainer.planning.planning import plan_run

ROOT = Path(__file__).resolve().parents[3]
CONFIG = str(ROOT / "train_configs" / "flux1_dev_lora.yaml")
ORDER = "export CUDA_DEVICE_ORDER=PCI_BUS_ID\n"
SPARK = f"{ORDER}export PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.75\n"
DISCRETE = f"{ORDER}export PYTORCH_ALLOC_CONF=expandable_segments:True\n"
PASSED = (0, "", "")
CPU = '[ -n "${OMP_WAIT_POLICY+set}" ] || export OMP_WAIT_POLICY=PASSIVE\n'
WAYS = (
    "give the container its GPUs (docker run --gpus all; the compose file of your hardware; in Kubernetes:"
    " resources.limits with nvidia.com/gpu: 1) and leave CUDA_VISIBLE_DEVICES unset or set to indices;"
    " TRAINER_PROFILE=cpu trains on the CPU on purpose"
)

Answer = tuple[int, str, str]
"""Exit code, stdout, stderr."""
Ask = Callable[..., Answer]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Ask:
    """ask(facts, *words, NAME=value): `trainer preflight WORDS` on a machine, in a container with mounts."""
    for name in ("UNIFIED_MEMORY", "DISABLE_CPU_OFFLOAD", "LD_LIBRARY_PATH", "HF_HUB_CACHE", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "output").mkdir()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "models"))
    monkeypatch.setenv("TRAINER_CACHE_DIR", str(tmp_path / "cache"))
    mounts(monkeypatch, tmp_path, ("/data", "/home/me/data"), (str(tmp_path), "/home/me/tmp"))

    def run(facts: Facts, *words: str, **variables: str) -> Answer:
        path = tmp_path / "facts.json"
        path.write_text(codec.to_json(facts))
        monkeypatch.setenv("TRAINER_FACTS", str(path))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        code = main(["preflight", "--", *words])
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def mounts(monkeypatch: pytest.MonkeyPatch, folder: Path, *pairs: tuple[str, str]) -> None:
    """The container's mounts: (path in it, path on the host)."""
    lines = [f"2 1 8:1 {root} {path} rw - ext4 /dev/sda1 rw" for path, root in (("/", "/"), *pairs)]
    lines[0] = "1 0 0:50 / / rw - overlay overlay rw"
    (folder / "mountinfo").write_text("\n".join(lines))
    monkeypatch.setattr(module, "MOUNTINFO", folder / "mountinfo")


def train(folder: Path) -> tuple[str, ...]:
    return ("train", CONFIG, "--output", str(folder / "output" / "lora"))


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("dgx-spark", "dgx-spark"),
        ("rtx-4090", "rtx-4090"),
        ("h200", "hopper-fp8"),
        ("a100-80gb", "generic-cuda"),
        ("driver-550-cuda-12-torch", "generic-cuda"),
    ],
)
def test_machines_that_train(ask: Ask, tmp_path: Path, name: str, profile: str) -> None:
    for requested in ("auto", profile):
        assert ask(machine(name), *train(tmp_path), TRAINER_PROFILE=requested) == PASSED


@pytest.mark.parametrize("name", ["dgx-spark", "rtx-4090", "h200", "cpu"])
def test_nothing_is_left_for_a_shell_to_set(
    ask: Ask,
    tmp_path: Path,
    name: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The training process has by itself what `plan --export` would have a shell give it."""
    config, output = ROOT / "train_configs" / "quickstart.yaml", tmp_path / "output" / "lora"
    facts = machine(name)
    monkeypatch.chdir(ROOT)
    for variable in ("CUDA_DEVICE_ORDER", "PYTORCH_ALLOC_CONF", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(variable, raising=False)
    words = (str(config), "--output", str(output))
    assert ask(facts, "train", *words) == PASSED
    assert main(["plan", *words, "--export"]) == 0
    exports = capfd.readouterr().out
    assert exports == {"dgx-spark": SPARK, "cpu": CPU}.get(name, DISCRETE)
    exported = dict(re.findall(r"export (\w+)=(.+)\n", exports))
    plan = plan_run(Layers((config,), (), None, output).load(), facts)
    assert exported.items() <= child_environment(plan, facts).items()


REFUSED = {
    "driver too old": (
        machine("driver-550-cuda-13-torch"),
        {},
        "driver 550.163.01: runs CUDA 12.4 and older, torch was built for 13.0\n"
        "    -> upgrade the driver to 580 or newer, or use a build of torch for CUDA 12; as a container:"
        " docs/cuda13.md has the arguments of an image for CUDA 12, which nobody has built yet\n",
    ),
    "no GPU": (
        machine("no-gpu-cuda-torch"),
        {"TRAINER_PROFILE": "generic-cuda"},
        f"TRAINER_PROFILE: profile generic-cuda needs a GPU, and none is visible\n    -> {WAYS}\n",
    ),
    "hidden GPU": (
        dataclasses.replace(machine("h200"), gpus=(), gpu_problem="libcuda is not visible"),
        {},
        "TRAINER_PROFILE: an NVIDIA driver is loaded, but no GPU is visible (libcuda is not visible)\n"
        f"    -> {WAYS}\n",
    ),
    "CPU torch": (
        machine("cpu-torch-on-gpu"),
        {},
        "torch 2.13.0: a CPU-only build, but this machine has a GPU (NVIDIA GeForce RTX 4090)\n"
        "    -> install the CUDA build of torch; as a container: the image for rtx-4090 instead of the one"
        " for cpu; TRAINER_PROFILE=cpu trains on the CPU on purpose\n",
    ),
    "GPU too old": (
        machine("too-old-gpu"),
        {},
        "torch 2.13.0: carries no code for NVIDIA GeForce GTX 1080 (sm_61), only sm_75 sm_80 sm_86 sm_90"
        " sm_100 sm_120 compute_120\n"
        "    -> use a build of torch whose list covers sm_61, or another GPU; TRAINER_PROFILE=cpu trains on"
        " the CPU on purpose\n",
    ),
    "wrong profile": (
        machine("rtx-4090"),
        {"TRAINER_PROFILE": "dgx-spark"},
        "TRAINER_PROFILE=dgx-spark: profile dgx-spark contradicts this machine (NVIDIA GeForce RTX 4090): it"
        " is for compute capability 12.1, this GPU has 8.9\n"
        "    -> use TRAINER_PROFILE=rtx-4090, or auto\n",
    ),
    "unified memory elsewhere": (
        machine("h200"),
        {"UNIFIED_MEMORY": "TRUE"},
        "UNIFIED_MEMORY=true: it requires a GPU that shares its memory with the CPU:"
        " NVIDIA H200 has memory of its own\n"
        "    -> unset UNIFIED_MEMORY\n",
    ),
    "no headroom": (
        dataclasses.replace(
            machine("dgx-spark"),
            memory=dataclasses.replace(machine("dgx-spark").memory, available_bytes=18 * 1024**3),
        ),
        {},
        "unified memory: 18.0 GiB of 121.7 GiB are available, and 20.0 GiB must stay free for the host:"
        " nothing is left to train with\n"
        "    -> stop what else uses memory (docker ps, a notebook, a desktop)\n",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_machines_that_cannot(ask: Ask, tmp_path: Path, case: str) -> None:
    facts, variables, said = REFUSED[case]
    code, out, err = ask(facts, *train(tmp_path), **variables)
    assert (code, out) == (69, "")
    assert err == f"error: this hardware cannot do it (exit code 69)\n{said}"


def test_the_manual_quotes_the_refusal_of_an_old_driver(ask: Ask, tmp_path: Path) -> None:
    _, _, err = ask(machine("driver-550-cuda-13-torch"), *train(tmp_path))
    assert f"```text\n{err}```\n" in (ROOT / "docs" / "cuda13.md").read_text()


MISNAMED = (
    "error: bad configuration (exit code 78)\n"
    'TRAINER_PROFILE: there is no profile "rtx4080"\n'
    "    -> did you mean `rtx-4090`? known: auto, dgx-spark, rtx-4090, hopper-fp8, generic-cuda, cpu\n"
)


@pytest.mark.parametrize("name", ["rtx-4090", "cpu", "no-gpu-cuda-torch"])
def test_a_profile_that_does_not_exist(
    ask: Ask, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A slip of the pen, whatever the machine: of the container, and of every command that plans."""
    assert ask(machine(name), *train(tmp_path), TRAINER_PROFILE="rtx4080") == (78, "", MISNAMED)
    assert main(["plan", CONFIG]) == 78
    assert capfd.readouterr().err == MISNAMED


def test_a_misnamed_profile_and_a_misplaced_mount_are_told_together(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts(monkeypatch, tmp_path, ("/app/data", "/home/me/cats"))
    code, _, err = ask(machine("rtx-4090"), *train(tmp_path), TRAINER_PROFILE="rtx4080")
    assert code == 78
    assert err.startswith(MISNAMED.replace("configuration", "configuration, 2 problems"))
    assert "\n/app/data: a folder" in err


@pytest.mark.parametrize("name", ["UNIFIED_MEMORY", "DISABLE_CPU_OFFLOAD"])
def test_a_switch_that_is_none(ask: Ask, tmp_path: Path, name: str) -> None:
    assert ask(machine("h200"), *train(tmp_path), **{name: "yes"}) == (
        78,
        "",
        "error: bad configuration (exit code 78)\n"
        f'{name}: "yes" is neither true nor false\n'
        "    -> write true or false\n",
    )


def test_a_foreign_cudnn(ask: Ask, tmp_path: Path) -> None:
    for folder in ("clean", "cudnn"):
        (tmp_path / folder).mkdir()
    (tmp_path / "cudnn" / "libcudnn.so.9").touch()
    path = f":{tmp_path}/clean::{tmp_path}/absent:{tmp_path}/cudnn"
    assert ask(machine("h200"), *train(tmp_path), LD_LIBRARY_PATH=path) == (
        78,
        "",
        "error: bad configuration (exit code 78)\n"
        "LD_LIBRARY_PATH: a foreign cuDNN hides the one that torch brings, and torch aborts:"
        f" {tmp_path}/cudnn/libcudnn.so.9\n"
        f"    -> take {tmp_path}/cudnn out of it, or unset it\n",
    )
    assert ask(machine("h200"), *train(tmp_path), LD_LIBRARY_PATH=f"{tmp_path}/clean")[0] == 0


def test_torchs_own_cudnn_is_not_foreign(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "site-packages/nvidia/cudnn/lib"
    own.mkdir(parents=True)
    (own / "libcudnn.so.9").touch()
    torch = tmp_path / "site-packages/torch"
    monkeypatch.setattr("trainer.machine.torch_build.torch_folder", lambda: torch)
    assert ask(machine("h200"), *train(tmp_path), LD_LIBRARY_PATH=str(own))[0] == 0


def test_a_misplaced_mount(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts(monkeypatch, tmp_path, ("/app/data", "/home/me/cats"), (str(tmp_path), "/home/me/tmp"))
    assert ask(machine("h200"), *train(tmp_path)) == (
        78,
        "",
        "error: bad configuration (exit code 78)\n"
        "/app/data: a folder is mounted here, where nothing looks: images with captions, or conversations"
        " belong on /data\n"
        "    -> mount it there: -v /home/me/cats:/data:ro\n",
    )
    for named in (("--dataset", "/app/data"), ("--set", "data.cache_dir=/app/data/x")):
        _, _, err = ask(machine("h200"), *train(tmp_path), *named)
        assert "where nothing looks" not in err, "the user named it"


def test_folders_are_asked_by_writing(ask: Ask) -> None:
    """Root may write in /proc by its bits, and cannot."""
    code, out, err = ask(machine("h200"), "train", CONFIG, "--output", "/proc/runs/lora")
    assert (code, out) == (78, "")
    assert f"/proc/runs/lora: the run's folder cannot be written by user {os.getuid()}:{os.getgid()}: " in err


def test_an_output_that_cannot_be_written(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, tmp_path / "output")
    owner = (tmp_path / "output").stat().st_uid
    alternative = f" or run as its owner: docker run --user {owner}:0;" if owner else ""
    assert ask(machine("h200"), *train(tmp_path)) == (
        78,
        "",
        "error: bad configuration (exit code 78)\n"
        f"{tmp_path}/output/lora: the run's folder cannot be written by user {os.getuid()}:{os.getgid()}:"
        " Permission denied\n"
        f"    -> on the host: sudo chown -R {os.getuid()}:{os.getgid()} /home/me/tmp/output (that is its path"
        f" on its disk: where you mounted another one, chown that);{alternative} in Kubernetes:"
        " securityContext.fsGroup\n",
    )


@pytest.mark.parametrize("service", ["ui", "queue"])
def test_services_need_a_folder_to_write_and_no_machine(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    output, empty = tmp_path / "output", dataclasses.replace(machine("h200"), gpus=())
    words = {"ui": ("ui", "--runs", str(output), "--port", "0"), "queue": ("queue", "run", "--stop-runs")}
    monkeypatch.setenv("TRAINER_QUEUE_DIR", str(output / ".queue"))
    assert ask(empty, *words[service]) == PASSED
    refuse(monkeypatch, output)
    code, out, err = ask(empty, *words[service])
    assert (code, out) == (78, "")
    assert f"the folder of `trainer {service}` cannot be written by user {os.getuid()}:" in err
    assert "/home/me/tmp/output" in err, "the line to type on the host"
    assert ask(empty, *words[service], "--help") == PASSED
    assert ask(empty, "queue", "list") == PASSED


def test_the_state_of_a_service_in_the_containers_own_layer_is_warned_of(ask: Ask) -> None:
    code, _, err = ask(machine("cpu"), "ui", "--runs", "/tmp")
    assert code == 0 and "/tmp/.studio is not on a mounted folder" in err


def refuse(monkeypatch: pytest.MonkeyPatch, refused: Path) -> None:
    """Nobody can make a file in `refused`; permission bits alone would not stop root."""
    real = tempfile.TemporaryFile

    def made(dir: Path) -> object:
        if dir == refused:
            raise PermissionError(13, "Permission denied")
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", made)


@pytest.mark.parametrize(
    ("words", "folder", "meaning"),
    [
        (("cache", CONFIG), "cache", "the folder of encoded samples"),
        (("fetch", CONFIG), "models", "the folder of base models"),
        (("sample", CONFIG), "models", "the folder of base models"),
        (("merge", CONFIG), "models", "the folder of base models"),
    ],
)
def test_each_command_has_its_folders(
    ask: Ask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    folder: str,
    meaning: str,
) -> None:
    # where nothing may be downloaded, nothing is written there; the library reads the variable once
    monkeypatch.setattr("trainer.modeling.base.hub.is_offline", lambda: False)
    assert ask(machine("h200"), *words)[0] == 0
    (tmp_path / folder).mkdir()
    refuse(monkeypatch, tmp_path / folder)
    code, _, err = ask(machine("h200"), *words)
    assert code == 78 and meaning in err
    if folder == "models":
        assert ask(machine("h200"), *words, "--set", "model.download=never")[2].count(meaning) == 0


def test_results_on_no_mount_are_warned_of(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts(monkeypatch, tmp_path)
    code, out, err = ask(machine("h200"), *train(tmp_path))
    assert (code, out) == (0, "")
    assert err.startswith(f"warning: {tmp_path}/output/lora is not on a mounted folder")


def test_machine_and_container_are_told_together(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts(monkeypatch, tmp_path, ("/app/data", "/home/me/cats"))
    code, _, err = ask(machine("too-old-gpu"), *train(tmp_path))
    assert code == 69
    assert "exit code 69" in err and "/app/data: a folder" in err


def test_what_the_plan_refuses_is_refused_here(ask: Ask, tmp_path: Path) -> None:
    small = with_gpu(machine("rtx-4090"), total_memory_bytes=4 * 1024**3)
    code, out, err = ask(small, *train(tmp_path))
    assert (code, out) == (69, "") and "the run does not fit" in err
    for before in ((), ("--json",)):
        code, _, err = ask(machine("h200"), *before, "train", str(tmp_path / "absent.yaml"))
        assert code == 78 and "absent.yaml: no such file" in err


def test_what_is_refused_is_told_as_json_where_that_is_asked_for(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error that was raised, and by one that was found: the command itself never starts."""

    def told(facts: Facts, *words: str) -> tuple[int, str]:
        code, out, err = ask(facts, "--json", *words)
        error = json.loads(out)["error"]
        assert error["exit_code"] == code and error["problems"][0]["what"] in " ".join(err.split())
        return code, error["problems"][0]["where"]

    small = with_gpu(machine("rtx-4090"), total_memory_bytes=4 * 1024**3)
    assert told(small, *train(tmp_path))[0] == 69
    absent = str(tmp_path / "absent.yaml")
    assert told(machine("h200"), "train", absent) == (78, absent)
    assert ask(small, *train(tmp_path))[:2] == (69, "")
    mounts(monkeypatch, tmp_path, ("/app/data", "/home/me/data"))
    assert told(machine("h200"), *train(tmp_path)) == (78, "/app/data")


def test_a_container_without_a_run_waits_for_no_heartbeat(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runtime = tmp_path / "runtime"
    monkeypatch.setenv("TRAINER_RUNTIME_DIR", str(runtime))
    ask(machine("h200"), "doctor")  # no folder is made for it
    assert not runtime.exists()
    runtime.mkdir()
    assert main(["health"]) == 1
    ask(machine("h200"), "doctor")
    capfd.readouterr()
    assert main(["health"]) == 0
    assert capfd.readouterr().out == "healthy: no run: this container does something else\n"
    ask(machine("h200"), *train(tmp_path))
    assert main(["health"]) == 1
    ask(
        machine("h200"), "sample", CONFIG, "--output", str(tmp_path / "picture.png")
    )  # in a folder of its own
    assert main(["health"]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("--version",),
        ("train", "--help"),
        ("train",),
        ("trian", CONFIG),
        *((name,) for name in COMMANDS if name not in ("probe", "verify-lora", "ui")),
        ("plan", CONFIG),
        ("config", "check", CONFIG),
        ("verify-lora", "my.safetensors"),
    ],
)
def test_what_needs_no_machine_is_let_through(ask: Ask, words: tuple[str, ...]) -> None:
    assert ask(machine("too-old-gpu"), *words) == (0, "", "")


def test_words_that_are_wrong_are_left_to_the_command(ask: Ask, tmp_path: Path) -> None:
    assert ask(machine("h200"), *train(tmp_path), "--outptu", "/x") == (0, "", "")


def test_verify_lora_with_a_configuration_needs_the_machine(ask: Ask) -> None:
    words = ("verify-lora", "my.safetensors", "--config", CONFIG)
    assert ask(machine("too-old-gpu"), *words)[0] == 69
    assert ask(machine("h200"), *words) == PASSED


@pytest.mark.parametrize(
    "words", [("sample", CONFIG), ("verify-lora", "my.safetensors", "--config", CONFIG)], ids=" ".join
)
def test_commands_of_one_gpu_ask_for_one(ask: Ask, words: tuple[str, ...]) -> None:
    assert ask(machine("h200"), *words, "--set", "parallel.gpus=2") == PASSED


def test_a_try_is_judged_by_what_its_run_has_kept(ask: Ask, tmp_path: Path) -> None:
    words = ("sample", CONFIG, "--try", str(tmp_path))
    assert ask(machine("h200"), *words, TRAINER__FEATURES__MEMORY_BUDGET="2GiB") == PASSED
    assert ask(machine("h200"), *words[:2], TRAINER__FEATURES__MEMORY_BUDGET="2GiB")[0] == 69


@pytest.mark.parametrize("runs", ["", CONFIG])
def test_a_studio_whose_words_are_wrong_is_left_to_the_command(ask: Ask, runs: str) -> None:
    assert ask(machine("cpu"), "ui", "--runs", runs) == PASSED


@pytest.mark.parametrize("words", [(), ("probe",), ("probe", CONFIG)])
def test_probe_says_itself_what_would_stop_a_run(ask: Ask, words: tuple[str, ...]) -> None:
    assert ask(machine("driver-550-cuda-13-torch"), *words) == (0, "", "")


def test_facts_that_cannot_be_read(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(machine("h200"))
    monkeypatch.setenv("TRAINER_FACTS", str(tmp_path / "absent.json"))
    assert main(["preflight", *train(tmp_path)]) == 78


def test_every_recorded_machine_is_judged() -> None:
    """A machine that is recorded anew belongs in one of the tables above."""
    judged = {"dgx-spark", "rtx-4090", "h200", "a100-80gb", "driver-550-cuda-12-torch"}
    judged |= {"driver-550-cuda-13-torch", "no-gpu-cuda-torch", "cpu-torch-on-gpu", "too-old-gpu", "cpu"}
    assert {path.stem for path in MACHINES.glob("*.json")} == judged


def two_hosts(number: int) -> dict[str, str]:
    return {"TRAINER_NODES": "2", "TRAINER_NODE_RANK": str(number), "TRAINER_MASTER": "127.0.0.1:7"}


def test_of_several_hosts_the_gpus_of_all_count(ask: Ask, tmp_path: Path) -> None:
    """A pod of two GPUs is half of a run of four."""
    facts = machine("h200")
    both = dataclasses.replace(facts, gpus=facts.gpus[:1] * 2)
    words = (*train(tmp_path), "--set", "train.gradient_accumulation_steps=4")
    assert ask(both, *words, TRAINER__PARALLEL__GPUS="4")[0] == 69
    code, _, errors = ask(both, *words, TRAINER__PARALLEL__GPUS="4", **two_hosts(1))
    assert code == 0, errors


@pytest.mark.parametrize("trouble", ["key", "machine"])
def test_what_ends_the_start_here_is_told_to_other_hosts(
    trouble: str, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the command itself is never started then."""
    told: list[tuple[int, int, str]] = []

    def tell(hosts: Hosts, exit_code: int, what: str) -> None:
        if hosts.several:
            told.append((hosts.number, exit_code, what))

    monkeypatch.setattr(other_hosts, "tell_end", tell)
    words = (*train(tmp_path), *(("--set", "lora.rnk=3") if trouble == "key" else ()))
    profile = {"TRAINER_PROFILE": "dgx-spark"} if trouble == "machine" else {}
    code, _, errors = ask(machine("h200"), *words, **profile)
    assert code in (69, 78) and not told
    assert ask(machine("h200"), *words, **two_hosts(1))[0] == code
    ((number, told_code, what),) = told
    assert (number, told_code) == (1, code) and what in errors
