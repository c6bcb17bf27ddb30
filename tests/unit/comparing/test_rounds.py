"""Runs of a comparison in their order, GPUs that are busy or throttled, and runs that do not end well."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import CPU_FACTS, ROOT
from tests.unit.comparing.conftest import Bench, variants_of
from trainer.cli import main
from trainer.cli.options import Layers
from trainer.config.judging.validation_rules import validates
from trainer.config.writing.dump import dump
from trainer.engine.comparing import child, report, verdicts
from trainer.engine.comparing.rounds import Extent
from trainer.engine.comparing.variants import measured_config
from trainer.errors import HardwareError
from trainer.files import codec
from trainer.machine import idle

GPU = ("features.compute=bf16", "features.compute=fp8")


def on_gpu() -> list[verdicts.Variant]:
    return variants_of(*GPU, config="llama_full.yaml", machine="h200.json")


def left(bench: Bench) -> list[Path]:
    """Paths that a comparison left in the folder for temporary files."""
    return list((bench.folder.parent / "temporary").iterdir())


def test_rounds_alternate_and_share_seed_cache_and_order(bench: Bench, tmp_path: Path) -> None:
    variants = variants_of("train.seed=3", "train.seed=8 lora.rank=4")
    outcome = bench.compare(variants, output=tmp_path / "kept", rounds=3, learn=5)
    assert outcome.code == 0 and not outcome.why
    assert bench.names() == [
        "round-1-A", "round-1-B", "round-2-B", "round-2-A", "round-3-A", "round-3-B",
        "learn-A", "learn-B", "learn-A-with-another-seed",
    ]  # fmt: skip
    assert [one["name"] for one in bench.journal[:2]] == ["cache-A", "cache-B"]
    seeds = {run.label: {row["seed"] for row in run.rows} for one in outcome.rounds for run in one}
    assert set(map(frozenset, seeds.values())) == {frozenset({3})}, "B has A's seed"
    assert outcome.again is not None and {row["seed"] for row in outcome.again.rows} == {4}
    from trainer.config.reading import strict_yaml

    for name in ("round-1-A", "round-2-B"):
        tree, problems = strict_yaml.read(tmp_path / "kept" / f"{name}.yaml")
        assert tree is not None and not problems
        content = tree.plain()
        assert isinstance(content, dict)
        assert content["data"]["cache_dir"] == str(tmp_path / "cache")  # type: ignore[index, call-overload]
        assert content["validation"]["prompts"] == []  # type: ignore[index, call-overload]
        assert int(content["checkpoint"]["checkpointing_steps"]) > 6  # type: ignore[index, call-overload, arg-type]


def test_variables_do_not_lie_over_what_the_comparison_writes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER__TRAIN__MAX_TRAIN_STEPS", "900")
    variants = variants_of("lora.rank=4", "lora.rank=8")
    assert variants[0].config.train.max_train_steps == 900
    outcome = bench.compare(variants, rounds=1)
    assert {len(run.rows) for run in outcome.rounds[0]} == {6}
    assert not any(one["given"] for one in bench.journal)


def test_a_compared_seed_is_each_ones_own(bench: Bench) -> None:
    import dataclasses

    variants = [
        dataclasses.replace(one, own_seed=True) for one in variants_of("train.seed=3", "train.seed=8")
    ]
    outcome = bench.compare(variants, rounds=1)
    assert [run.rows[0]["seed"] for run in outcome.rounds[0]] == [3, 8]


@pytest.mark.parametrize(("seeds", "other"), [((3, 4), 5), ((3, 9), 4), ((2**32 - 1, 0), 1)])
def test_the_other_seed_is_none_that_is_compared(bench: Bench, seeds: tuple[int, int], other: int) -> None:
    variants = [
        dataclasses.replace(one, own_seed=True)
        for one in variants_of(*(f"train.seed={seed}" for seed in seeds))
    ]
    outcome = bench.compare(variants, rounds=0, learn=3)
    assert outcome.again is not None and {row["seed"] for row in outcome.again.rows} == {other}


def test_a_busy_gpu_is_refused_by_the_others_name(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "PATIENCE_SECONDS", 0.0)
    bench.says(apps="12041, /opt/other/render, 41220\n")
    outcome = bench.compare(on_gpu())
    assert outcome.code == 69 and not bench.journal and not left(bench)
    assert isinstance(outcome.error, HardwareError) and "/opt/other/render" in str(outcome.error)


def test_the_command_refuses_a_busy_gpu_before_anything_is_measured(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def probe(*_: object, **__: object) -> None:
        raise AssertionError("kernels may not be measured beside another program")

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRAINER_FACTS", str(CPU_FACTS.with_name("h200.json")))
    monkeypatch.setattr("trainer.cli.measure.measure_kernels", probe)
    bench.says(apps="12041, /opt/other/render, 41220\n")
    assert main(["compare", "train_configs/quickstart.yaml", "--vary", "lora.rank=4,8"]) == 69
    captured = capsys.readouterr()
    assert "/opt/other/render" in captured.err and not captured.out and not bench.journal


def test_a_gpu_that_gets_busy_ends_it_and_keeps_what_is_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle, "PATIENCE_SECONDS", 0.0)
    bench.answers(apps='if grep -q round-1-B journal.jsonl; then echo "7, ollama, 900"; fi')
    variants = on_gpu()
    outcome = bench.compare(variants)
    assert outcome.code == 69 and "ollama" in outcome.why
    assert bench.names() == ["round-1-A", "round-1-B"]
    text = "\n".join(report.lines(variants, outcome, Extent(steps=4, warmup=2, rounds=2, learn=0)))
    assert "1 of 2 rounds" in text and "ollama" in text


def test_every_gpu_of_the_plan_must_be_idle(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.answers(apps='if test "$2" = 5; then echo "9, blender, 3000"; fi')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert idle.names_of([0, 1]) == ["2", "5"]
    child.require_idle(idle.names_of([0]), patience=0.0)
    with pytest.raises(HardwareError, match="blender"):
        child.require_idle(idle.names_of([0, 1]), patience=0.0)


def test_without_nvidia_smi_a_gpu_is_not_taken_to_be_idle(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bench.folder.parent / "bin" / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(bench.folder))
    outcome = bench.compare(on_gpu())
    assert outcome.code == 69 and "no nvidia-smi" in outcome.why


def test_a_throttled_round_is_marked(bench: Bench) -> None:
    bench.runs["round"] = {"slow": 0.1}
    # nvml.h: 0x20 software thermal slowdown, 0x1 idle
    hot, cold = "0x21, 1200, 1980, 90112", "0x1, 1980, 1980, 90112"
    bench.answers(
        clocks=f'case "$(tail -n 1 journal.jsonl)" in *-B*) echo "{hot}" ;; *) echo "{cold}" ;; esac'
    )
    variants = on_gpu()
    outcome = bench.compare(variants)
    marks = {run.label: verdicts.throttled(run) for one in outcome.rounds for run in one}
    assert [label for label, mark in marks.items() if mark] == ["round 1, B", "round 2, B"]
    assert "heat, by the driver" in marks["round 2, B"] and "1200 to" in marks["round 2, B"]
    speeds = verdicts.speeds(variants, outcome, 2)
    assert speeds["B"].driver_gib == 88.0
    text = "\n".join(report.lines(variants, outcome, Extent(steps=4, warmup=2, rounds=2, learn=0)))
    for number in (1, 2):
        assert f"throttled: round {number}, B: heat, by the driver" in text
    assert "marked" in text


def test_a_power_cap_is_a_figure_and_no_mark(bench: Bench) -> None:
    """It is usual under full load."""
    bench.runs["round"] = {"slow": 0.1}
    # nvml.h: 0x4 software power cap
    capped, free = "0x4, 1500, 1980, 90112", "0x0, 1980, 1980, 90112"
    bench.answers(
        clocks=f'case "$(tail -n 1 journal.jsonl)" in *-B*) echo "{capped}" ;; *) echo "{free}" ;; esac'
    )
    variants = on_gpu()
    outcome = bench.compare(variants)
    speeds = verdicts.speeds(variants, outcome, 2)
    assert (speeds["A"].power_capped, speeds["B"].power_capped) == (0.0, 1.0)
    assert not speeds["B"].throttled
    text = "\n".join(report.lines(variants, outcome, Extent(steps=4, warmup=2, rounds=2, learn=0)))
    assert "looks at the power cap" in text and "unequal shares" in text and "throttled" not in text


NAMED = {
    "epochs": {"train": {"num_train_epochs": 3}},
    "metrics": {"validation": {"metrics": ["clip_t"], "prompts": ["a cat"]}},
    "early stop": {"validation": {"early_stop": {"patience": 2}, "held_out": 2}},
    "columns": {"validation": {"chat_file": "c.jsonl", "columns": {"messages": "turns"}}},
    "dataset_info": {"validation": {"dataset_info": "i.json", "name": "a"}},
}


@pytest.mark.parametrize("keys", NAMED.values(), ids=NAMED)
def test_the_length_is_the_comparisons_and_nothing_is_validated(keys: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the user's file says of its own length and validation."""
    family = "llama" if {"chat_file", "dataset_info"} & {*keys.get("validation", {})} else "flux1_dev"
    kind = "chat_file" if family == "llama" else "img_dir"
    sets = [{kind: str(tmp_path / "a.jsonl")}]
    own = {"family": family, "output_dir": str(tmp_path / "o"), "data": {"sets": sets}}
    (tmp_path / "own.yaml").write_text(json.dumps({**own, **keys}))
    config = Layers([tmp_path / "own.yaml"]).load().config
    variant = dataclasses.replace(variants_of("train.seed=1")[0], config=config)
    run = measured_config(variant, 12, seed=1, cache=tmp_path / "cache")
    (tmp_path / "run.yaml").write_text(dump(run))
    found = Layers([tmp_path / "run.yaml"]).load().config
    assert (found.train.max_train_steps, found.train.num_train_epochs) == (12, None)
    assert not validates(found) and not found.validation.metrics and found.validation.early_stop is None


def test_a_run_that_was_planned_otherwise_is_told(bench: Bench) -> None:
    variants = on_gpu()
    plan = bench.folder / "plan.json"
    plan.write_text(codec.to_json(variants[0].plan))
    bench.runs |= {"round": {"plan": str(plan)}}
    bench.compare(variants, rounds=1)
    assert not [one for one in bench.told if one.startswith("round 1, A: planned")]
    assert [one for one in bench.told if one.startswith("round 1, B: planned otherwise") and "compute" in one]


@pytest.mark.parametrize(("code", "name"), [(71, "round-2-B"), (70, "round-1-B"), (65, "round-1-A")])
def test_a_run_that_fails_ends_it_with_its_code(bench: Bench, code: int, name: str) -> None:
    bench.runs[name] = {"end": (3, code)}
    outcome = bench.compare(variants_of("lora.rank=4", "lora.rank=8"))
    assert outcome.code == code and bench.names()[-1] == name
    assert outcome.why.endswith(f"ended with exit code {code}")
    assert any("fails as it was told" in text for text in bench.told), "its last lines are shown"
    assert not left(bench)


def test_one_that_cannot_encode_ends_it(bench: Bench) -> None:
    bench.more["cache_code"] = 65
    outcome = bench.compare(variants_of("lora.rank=4", "lora.rank=8"))
    assert outcome.code == 65 and not bench.names() and not outcome.has_steps


def test_one_that_diverges_while_it_learns_is_named_and_the_others_go_on(bench: Bench) -> None:
    bench.runs["learn-B"] = {"end": (7, 70)}
    variants = variants_of("lora.rank=4", "lora.rank=8", "lora.rank=16")
    outcome = bench.compare(variants, rounds=0, learn=10)
    assert outcome.code == 70
    assert bench.names() == ["learn-A", "learn-B", "learn-C", "learn-A-with-another-seed"]
    found = verdicts.learned(outcome)
    assert found["B"].verdict == "diverged after 7 steps"
    assert found["C"].verdict.startswith("learns the same")
    assert outcome.again is not None and outcome.why == "", "all runs were made"


def test_one_that_changed_nothing_did_not_diverge(bench: Bench) -> None:
    bench.runs["learn-B"] = {"end": (10, 70)}
    outcome = bench.compare(variants_of("lora.rank=4", "lora.rank=8"), rounds=0, learn=10)
    found = verdicts.learned(outcome)["B"]
    assert found.diverged_after is None and found.steps == 10 and found.verdict.startswith("learns the same")


def test_a_step_that_fp16_skipped_is_not_where_it_diverged(bench: Bench) -> None:
    bench.runs["learn-B"] = {"end": (5, 70), "losses": [None, 1.0, None, 1.0, None]}
    outcome = bench.compare(variants_of("lora.rank=4", "lora.rank=8"), rounds=0, learn=10)
    assert verdicts.learned(outcome)["B"].verdict == "diverged after 4 steps"


def test_one_that_was_killed_is_reported_as_a_shell_does(bench: Bench) -> None:
    bench.runs["round-1-B"] = {"slow": 0.2}

    def kill() -> None:
        while "round-1-B" not in bench.names():
            time.sleep(0.01)
        os.kill(bench.journal[-1]["pid"], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    outcome = bench.compare(variants_of("lora.rank=4", "lora.rank=8"))
    killer.join()
    assert outcome.code == 137 and not left(bench)
    assert len(outcome.timed(outcome.rounds[0][0].variant)) == 1, "what ended well is kept"


COMMAND = """
import sys
from pathlib import Path
from tests.unit.comparing.conftest import fake_python
from trainer.cli import main
from trainer.engine.comparing import child
child.python = fake_python(Path(sys.argv[1]))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    "signum",
    [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGKILL))],
)
def test_a_comparison_that_is_stopped_ends_its_run(bench: Bench, signum: signal.Signals) -> None:
    """Asked to end it prints what is there and leaves nothing behind; killed it leaves no process behind."""
    bench.runs["round-2-B"] = {"slow": 0.5}
    bench.write_script()
    temporary = bench.folder.parent / "temporary"
    words = ["compare", "train_configs/quickstart.yaml", "--vary", "lora.rank=4,8", "--steps", "20"]
    environ = {
        **os.environ,
        "TRAINER_FACTS": str(CPU_FACTS),
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(temporary),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(bench.script), *words],
        cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while "round-2-B" not in bench.names():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    time.sleep(0.3)  # until the fake handles signals
    process.send_signal(signum)
    out, errors = process.communicate(timeout=60)
    pid = bench.journal[-1]["pid"]
    end = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    if signum == signal.SIGKILL:
        return
    assert process.returncode == 75, errors
    assert "ms/step, median" in out and "stopped in round 2, B" in out and "1 of 2 rounds" in out
    assert "as fast as A" in out
    assert not list(temporary.iterdir())
