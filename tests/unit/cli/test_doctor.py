"""`trainer doctor`: exit codes, what goes where, and what it never does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.planning.conftest import machine
from trainer.cli import main
from trainer.config import environment
from trainer.files import codec
from trainer.machine.facts import KernelVerdict

ROOT = Path(__file__).resolve().parents[3]
MACHINES = ROOT / "tests" / "golden" / "machines"
RIGHT = "finetuning_type: full\nbf16: true\nlearning_rate: 1e-5\n"
SLOW = "finetuning_type: full\nfp8: true\n"
ERROR = "finetuning_type: full\nbf16: true\nfp16: true\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINER_FACTS", str(MACHINES / "h200.json"))
    monkeypatch.setenv("TRAINER_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("UNIFIED_MEMORY", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "NVTE_FLASH_ATTN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "facts", "words", "code"),
    [
        (RIGHT, "h200", (), 0),
        (SLOW, "h200", (), 0),
        (SLOW, "h200", ("--strict",), 78),
        (ERROR, "h200", (), 78),
        (RIGHT, "a100-80gb", (), 0),
        (SLOW, "a100-80gb", (), 69),
        (ERROR + "fp8: true\n", "a100-80gb", (), 78),
        ("family: tiny\ndata: {}\n", "h200", ("--strict",), 0),
    ],
)
def test_exit_codes(here: Path, text: str, facts: str, words: tuple[str, ...], code: int) -> None:
    (here / "sft.yaml").write_text(text)
    assert main(["doctor", "sft.yaml", "--facts", str(MACHINES / f"{facts}.json"), *words]) == code


def test_findings_are_on_stdout_with_file_and_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "sft.yaml").write_text(SLOW)
    assert main(["doctor", "sft.yaml"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("sft.yaml: LLaMA-Factory configuration\n  slow    line 2: FP8 by torchao without ")
    assert "lf-fp8-eager (The FP8 document, error 4" in out and "\nfound: 1 slow\n" in out
    assert out.splitlines()[-1].startswith(
        "FP8 here: works, as measured at m4608 n9216 k3072: 0.44 ms, bf16 "
    )
    assert err == ""


def test_a_file_that_cannot_be_read_is_78_and_the_others_are_judged(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "good.yaml").write_text(RIGHT)
    (here / "bad.json").write_text('{"a": 1,,}')
    (here / "notes.md").write_text("words\n")
    assert main(["doctor", "good.yaml", "bad.json", "absent.sh", "notes.md"]) == 78
    out, err = capsys.readouterr()
    assert "good.yaml: LLaMA-Factory configuration, nothing wrong\n" in out
    assert "notes.md: kind of file that the doctor does not know, left alone\n" in out
    assert "bad.json:1: not valid JSON: " in err and "absent.sh: no such file\n    -> " in err
    (here / "bad.json").unlink()
    assert main(["doctor", "good.yaml", "notes.md", "--strict"]) == 0


@pytest.mark.parametrize("words", [("",), ("--environment", ""), ("--facts", "")])
def test_an_empty_name_is_not_the_working_folder(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 78
    assert 'expected a path, got ""' in capsys.readouterr().err


def test_names_here(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "sft.yaml").write_text(RIGHT + "cutoff_len: 2048\ntemplate: llama3\n")
    assert main(["doctor", "sft.yaml"]) == 0
    assert "of these keys have names here: add --names" in capsys.readouterr().out
    assert main(["doctor", "sft.yaml", "--names"]) == 0
    out = capsys.readouterr().out
    assert "\n     4  cutoff_len -> data.max_sequence_length: a longer conversation is an error" in out
    assert "\n     5  template -> data.chat_template: the tokenizer's own unless written" in out


def test_json_has_everything(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "sft.yaml").write_text(SLOW)
    (here / "bad.json").write_text("{")
    assert main(["doctor", ".", "bad.json", "--json"]) == 78
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert [(one["rule"], one["place"], one["line"]) for one in report["findings"]] == [
        ("lf-fp8-eager", "sft.yaml", 2)
    ]
    assert report["problems"][0]["where"] == "bad.json:1" and report["fp8"].startswith("FP8 here: works")
    assert {one["key"]: one["ours"] for one in report["called_here"]}["fp8"] == "features.compute"


def test_this_place(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr(environment, "snapshot", lambda: {"HOME": "/root", **dict(given)})
    assert main(["doctor"]) == 0
    quiet = capsys.readouterr().out
    assert quiet.startswith("environment: environment, nothing wrong\npackages: ")
    given["NVTE_FLASH_ATTN"] = "0"
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "unused  NVTE_FLASH_ATTN: Transformer Engine is not used here" in out and "env-elsewhere" in out
    given["CUDA_VISIBLE_DEVICES"] = "all"
    assert main(["doctor"]) == 78
    assert out != capsys.readouterr().out


def test_a_machine_on_which_no_run_can_start_is_69(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--facts", str(MACHINES / "driver-550-cuda-13-torch.json")]) == 69
    out = capsys.readouterr().out
    assert "machine: machine\n  error   driver 550." in out and "trainer preflight" in out


def test_variables_of_a_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "env.txt").write_text("HOME=/root\nNVTE_FLASH_ATTN=0\nMANY=a\n  lines\n")
    assert main(["doctor", "--environment", "env.txt", "--strict"]) == 78
    assert "unused  line 2: Transformer Engine is not used here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h200", "works, as measured at m4608 n9216 k3072: 0.44 ms, bf16 0.73 ms"),
        (
            "rtx-4090",
            "not measured; NVIDIA GeForce RTX 4090 has the units. `trainer probe CONFIG` measures it",
        ),
        ("a100-80gb", "no, NVIDIA A100-SXM4-80GB has compute capability 8.0, and FP8 units begin with 8.9"),
        ("cpu", "no, there is no GPU"),
    ],
)
def test_does_fp8_work_here(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--facts", str(MACHINES / f"{name}.json")])
    assert f"FP8 here: {said}" in capsys.readouterr().out


def test_fp8_that_the_probe_saw_failing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import dataclasses

    broken = KernelVerdict(
        kernel="matmul.fp8",
        shape_class="m1 n1 k1",
        works=False,
        milliseconds=None,
        relative_error=None,
        reason="it crashed",
    )
    (here / "m.json").write_text(codec.to_json(dataclasses.replace(machine("h200"), verdicts=(broken,))))
    assert main(["doctor", "--facts", "m.json"]) == 0
    assert "FP8 here: no, the probe saw it failing at m1 n1 k1: it crashed" in capsys.readouterr().out


def test_facts_that_are_none_are_78(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "m.json").write_text("{}")
    assert main(["doctor", "--facts", "m.json"]) == 78
    assert "--facts=m.json" in capsys.readouterr().err


def test_nothing_is_started_and_no_torch_imported(here: Path) -> None:
    (here / "sft.yaml").write_text(SLOW)
    program = (
        "import subprocess, os, sys\n"
        "def refuse(*words, **more): raise AssertionError('a process was started')\n"
        "subprocess.Popen.__init__ = refuse\n"
        "os.system = os.posix_spawn = os.fork = refuse\n"
        "from trainer.cli import main\n"
        "codes = [main(['doctor']), main(['doctor', 'sft.yaml'])]\n"
        "heavy = {'torch', 'transformers', 'accelerate', 'diffusers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert codes[1] == 0\n"
    )
    variables = {"PATH": "/usr/bin:/bin", "HOME": str(here), "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_projects_own_files_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    folders = [str(ROOT / name) for name in ("compose", "docker", "k8s", "scripts", "constraints.txt")]
    assert main(["doctor", *folders, "--strict", "--facts", str(MACHINES / "dgx-spark.json")]) == 0
    out = capsys.readouterr().out
    assert "Dockerfile: Dockerfile, nothing wrong" in out and ": compose file, nothing wrong" in out
    assert ": Kubernetes manifest, nothing wrong" in out
