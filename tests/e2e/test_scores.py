"""Metrics of previews by the commands that people run, and two ranks that end early together."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.contract.runs import LORA_CASES, different, numbers, products
from tests.e2e.conftest import ROOT, Start, common_environment
from tests.e2e.nursery import Nursery
from tests.scoring_models import write_clip, write_dinov2
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics
from trainer.telemetry.status import read_status, verdict

NAMES = ("clip_t", "dinov2", "nearest_train", "diversity")
NEVER_BETTER = (
    "train.max_train_steps=40",
    "validation.every_steps=2",
    "validation.early_stop.patience=2",
    "validation.early_stop.min_delta=100",
)


@pytest.mark.slow
def test_the_quickstart_is_measured_while_it_trains_and_by_the_command(
    nursery: Callable[..., Nursery], tmp_path: Path
) -> None:
    environ = common_environment() | {
        "TRAINER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "TRAINER_CACHE_DIR": str(tmp_path / "cache"),
        "TRAINER_METRICS_PORT": "0",
    }

    def trainer(*words: str, **variables: str) -> CompletedProcess[str]:
        return nursery(alternate=True).run(["-m", "trainer", *words], environ | variables)

    clip, dinov2 = write_clip(tmp_path / "clip"), write_dinov2(tmp_path / "dinov2")
    values = {
        "data.resolution": "64",
        "train.max_train_steps": "4",
        "train.train_batch_size": "2",
        "train.lr_warmup_steps": "1",
        "validation.every_steps": "2",
        "validation.num_inference_steps": "2",
        "validation.prompts": "[unicorn, robot, unicorn]",
        "validation.metrics": f"[{', '.join(NAMES)}]",
        "validation.clip_model": str(clip),
        "validation.dinov2_model": str(dinov2),
    }
    options = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    config, run = "train_configs/quickstart.yaml", tmp_path / "run"
    plan = trainer("plan", config, "--output", str(run), *options)
    planned = " ".join(plan.stdout.split())
    assert "loaded after each round of previews on the CPU" in planned and "scoring" in planned, plan.stderr
    done = trainer("train", config, "--output", str(run), *options)
    assert done.returncode == 0, done.stderr
    rows = [row for row in read_metrics(run / METRICS_LOG) if "score_data" in row]
    assert [row["step"] for row in rows] == [0, 2, 4]

    # what lies over files for other runs does not lie over this one's
    scored = trainer("score", str(run), "--json", TRAINER__VALIDATION__DINOV2_MODEL="nowhere")
    assert scored.returncode == 0, scored.stderr
    rounds: list[dict[str, Any]] = json.loads(scored.stdout)["rounds"]
    assert [one["step"] for one in rounds] == [0, 2, 4]
    for one, row in zip(rounds, rows, strict=True):
        assert one["metrics"] == pytest.approx({name: row[name] for name in NAMES})
        assert one["refused"]["kid"].startswith("3 pictures, and 50 are needed")
        assert one["refused"]["fid"].startswith("3 pictures, and 10,000 are needed")
    table = trainer("score", str(run)).stdout.splitlines()
    assert table[0].split()[:3] == ["step", "pictures", "clip_t"] and len(table) == 4

    # a training picture among the generated ones, with prompts of a file
    folder, prompts = tmp_path / "drawn", tmp_path / "prompts.txt"
    shutil.copytree(run / "samples" / "step-000004", folder)
    shutil.copy(ROOT / "examples" / "style" / "anchor.png", folder / "03.png")
    prompts.write_text("unicorn\nrobot\nunicorn\nanchor\n")
    given = ["--pictures", str(folder), "--data", "examples/style", "--prompts", str(prompts)]
    models = ["--clip", str(clip), "--dinov2", str(dinov2), "--threshold", "0.9999"]
    copied = trainer("score", *given, *models)
    assert copied.returncode == 0, copied.stderr
    said = (
        "warning: drawn/03.png is nearly the training picture style/anchor.png: cosine 1.0000, above 0.9999"
    )
    assert [line for line in copied.stderr.splitlines() if line.startswith("warning")] == [said]
    prompts.write_text("unicorn\n")
    short = trainer("score", *given, *models)
    assert short.returncode == 65 and "1 prompt for 4 pictures" in short.stderr
    gone = trainer("score", str(run), "--dinov2", str(tmp_path / "nowhere"))
    assert gone.returncode == 78 and "nowhere does not exist" in gone.stderr


@pytest.mark.slow
def test_two_ranks_end_early_together_with_the_bits_of_one(start: Start, tmp_path: Path) -> None:
    runs = [
        start(LORA_CASES[0], tmp_path / "one", *NEVER_BETTER),
        start(LORA_CASES[0], tmp_path / "two", *NEVER_BETTER, "parallel.gpus=2"),
    ]
    for process in runs:
        code, errors = process.end(280)
        assert code == 0, errors
        assert errors.count("early stop at step 4: validation_loss never fell below ") == 1
        assert errors.count("Proved: ") == 1
        status = read_status(process.runtime)
        assert status is not None
        assert verdict(status, status.beat).reason.startswith("finished: early stop at step 4: ")
    one, two = (process.run_dir for process in runs)
    assert numbers(one) == numbers(two)
    assert not different(products(one), products(two))
