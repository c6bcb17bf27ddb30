"""Runs that are started again: settings that they take over, refuse and report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contract.runs import (
    LORA_CASES,
    Job,
    KilledError,
    ToldStatus,
    Workshop,
    different,
    dying_after,
    files,
    numbers,
    small_samples,
    steps_saved,
)
from trainer.engine.caching.entries import list_entries
from trainer.engine.records.samples_file import SAMPLES_FILE
from trainer.errors import ConfigError, DataError, DivergedError
from trainer.files import codec
from trainer.planning.plan import Decision
from trainer.telemetry.status import Phase

CASE = LORA_CASES[0]
QUICK = (
    "train.max_train_steps=4",
    "checkpoint.checkpointing_steps=2",
    "validation.prompts=[]",
    "validation.held_out=0",
    "train.log_every_steps=1",
)
LONGER = (*QUICK, "train.max_train_steps=6")


@pytest.fixture(scope="module")
def four_steps(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that did four steps. Copy it to go on."""
    folder = tmp_path_factory.mktemp("four")
    workshop.job(CASE, folder, *QUICK).train()
    return folder


@pytest.fixture(scope="module")
def six_steps(workshop: Workshop, four_steps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `four_steps` after six steps. Read only."""
    folder = tmp_path_factory.mktemp("six")
    return again(workshop, four_steps, folder / "copy", *LONGER).folder


def again(workshop: Workshop, before: Path, folder: Path, *options: str) -> Job:
    """Go on in a copy of a run's folder."""
    shutil.copytree(before, folder)
    job = workshop.job(CASE, folder, *options)
    job.train()
    return job


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 0x40
    path.write_bytes(data)


def read_config(run_dir: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((run_dir / "config.resolved.yaml").read_text())
    return content


@pytest.mark.parametrize("group", ["weights", "optimizer"])
def test_a_flipped_bit_is_found_kept_aside_and_trained_again(
    group: str, workshop: Workshop, four_steps: Path, six_steps: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(four_steps, tmp_path / "copy"))
    flip(next((folder / "run" / "checkpoints" / "step-000004").glob(f"{group}-*")))
    job = workshop.job(CASE, folder, *LONGER)
    job.train()
    said = "\n".join(job.said)
    assert "checkpoint step-000004 is damaged and is passed over: the checksum of " in said
    assert "the damaged checkpoint is kept as step-000004.damaged" in said
    assert "resumed from step-000002" in said
    assert "step-000004.damaged" in steps_saved(job.folder)
    assert not different(files(job.folder, "lora/*"), files(six_steps, "lora/*"))


def test_a_run_without_an_intact_checkpoint_is_refused_and_touched_in_nothing(
    workshop: Workshop, four_steps: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(four_steps, tmp_path / "copy"))
    for path in (folder / "run" / "checkpoints").glob("*/weights-*"):
        flip(path)
    before = files(folder / "run", "**/*")
    with pytest.raises(ConfigError, match="none of the checkpoints here can be used"):
        workshop.job(CASE, folder, *LONGER).train()
    assert not different(files(folder / "run", "**/*"), before)


def test_a_checkpoint_with_less_on_record_goes_on_and_says_what_is_not_known(
    workshop: Workshop, four_steps: Path, six_steps: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(four_steps, tmp_path / "copy"))
    for path in folder.glob("run/checkpoints/*/state.json"):
        state = json.loads(path.read_text())
        recorded_since = ("compute", "text_encoders", "max_sequence_length", "train.ema_decay")
        state["fingerprint"] = {
            name: value
            for name, value in state["fingerprint"].items()
            if name not in recorded_since and not name.startswith("flow.") and name != "lora.type"
        }
        for key in ("settings", "sha256", "state_sha256"):
            del state[key]
        path.write_text(json.dumps(state))
    job = workshop.job(CASE, folder, *LONGER)
    job.train()
    said = "\n".join(job.said)
    assert "checkpoint step-000004 is of an earlier version and has no checksums to check it by" in said
    assert "could not be compared in: compute, flow.guidance_scale, flow.shift" in said
    assert "what changed in the settings since is not known" in said
    assert not different(files(job.folder, "lora/*"), files(six_steps, "lora/*"))


@pytest.mark.parametrize(
    "option",
    [
        *("flow.weighting_scheme=logit_normal", "flow.shift=3", "flow.guidance_scale=3.5"),
        *("data.max_sequence_length=32", "lora.rank=2", "train.seed=4"),
    ],
)
def test_another_experiment_is_refused(
    option: str, workshop: Workshop, four_steps: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(four_steps, tmp_path / "copy"))
    with pytest.raises(ConfigError, match="the run in this folder was started differently") as caught:
        workshop.job(CASE, folder, *LONGER, option).train()
    assert option.partition("=")[0] in {problem.where for problem in caught.value.problems}


def test_changes_that_are_no_other_experiment_are_said_with_both_values(
    workshop: Workshop, four_steps: Path, tmp_path: Path
) -> None:
    changed = ("train.learning_rate=0.002", "train.lr_scheduler=linear")
    job = again(workshop, four_steps, tmp_path / "copy", *LONGER, *changed)
    assert "train.learning_rate: 0.002 from here on, 0.001 before" in job.said
    assert "train.lr_scheduler: linear from here on, constant before" in job.said
    assert "train.max_train_steps: 6 from here on, 4 before" in job.said
    assert sum("from here on" in line for line in job.said) == 3
    assert read_config(job.folder)["train"]["learning_rate"] == 0.002


def test_a_finished_run_keeps_the_settings_that_it_was_trained_with(
    workshop: Workshop, four_steps: Path, tmp_path: Path
) -> None:
    job = again(workshop, four_steps, tmp_path / "copy", *QUICK, "train.learning_rate=0.002")
    said = "\n".join(job.said)
    assert "train.learning_rate: the run was trained with 0.001; 0.002 has no effect" in said
    assert "raise train.max_train_steps to train on, or choose another output_dir" in said
    assert read_config(job.folder)["train"]["learning_rate"] == 0.001
    assert not different(files(job.folder, "lora/*"), files(four_steps / "run", "lora/*"))
    other = again(workshop, four_steps, tmp_path / "other", *QUICK, "train.log_every_steps=2")
    assert read_config(other.folder)["train"]["log_every_steps"] == 2


def test_captions_stay_encoded_as_they_were(
    workshop: Workshop, four_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    folder = Path(shutil.copytree(four_steps, tmp_path / "copy"))
    job = workshop.job(CASE, folder, *LONGER)
    row = Decision("text_encoders", "nf4", "auto", "fp32 needs more")
    rows = (*job.context.plan.decisions, row)
    plan = dataclasses.replace(job.context.plan, text_encoder_weights="nf4", decisions=rows)
    spec = dataclasses.replace(job.spec, plan_text=codec.to_json(plan))
    job = dataclasses.replace(job, context=dataclasses.replace(job.context, plan=plan), spec=spec)
    job.train()
    assert "captions stay encoded in fp32, as the run began; this start alone would take nf4" in job.said
    assert any(line.endswith(" 0 encoded") for line in job.said)
    written = json.loads((job.folder / "plan.json").read_text())
    assert written["text_encoder_weights"] == "fp32"
    told = [one for one in written["decisions"] if one["feature"] == "text_encoders"]
    assert [(one["value"], one["reason"]) for one in told] == [
        ("fp32", "as the run began; this start alone would take nf4")
    ]


def test_captions_stay_encoded_as_they_were_where_a_run_has_no_checkpoint(
    workshop: Workshop, four_steps: Path, tmp_path: Path
) -> None:
    """A run killed before its first checkpoint: nobody can set what free memory decided for it."""
    import dataclasses

    folder = Path(shutil.copytree(four_steps, tmp_path / "copy"))
    shutil.rmtree(folder / "run" / "checkpoints")
    job = workshop.job(CASE, folder, *QUICK)
    plan = dataclasses.replace(job.context.plan, text_encoder_weights="nf4")
    job = dataclasses.replace(job, context=dataclasses.replace(job.context, plan=plan))
    job.train()
    assert "captions stay encoded in fp32, as the run began; this start alone would take nf4" in job.said


def test_a_run_that_diverges_reads_its_checkpoint_before_it_recommends_it(
    workshop: Workshop, four_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.engine.optimizing.updater import HostFlag

    folder = Path(shutil.copytree(four_steps, tmp_path / "copy"))
    saved = folder / "run" / "checkpoints" / "step-000004"

    def bad(flag: HostFlag) -> float:
        flip(next(saved.glob("weights-*")))
        return 1.0

    monkeypatch.setattr(HostFlag, "read", bad)
    with pytest.raises(DivergedError) as caught:
        workshop.job(CASE, folder, *LONGER).train()
    assert "the checkpoint of step 4 cannot be used: the checksum of weights-" in str(caught.value)


def test_a_run_resumed_from_elsewhere_that_diverges_names_the_checkpoint_it_came_from(
    workshop: Workshop, four_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.engine.optimizing.updater import HostFlag

    monkeypatch.setattr(HostFlag, "read", lambda flag: 1.0)
    elsewhere = four_steps / "run" / "checkpoints" / "step-000004"
    with pytest.raises(DivergedError) as caught:
        workshop.job(CASE, tmp_path, *LONGER, f"checkpoint.resume_from_checkpoint={elsewhere}").train()
    assert "the checkpoint of step 4 is intact" in str(caught.value)


def test_a_run_that_began_from_a_named_checkpoint_goes_on_with_the_same_command(
    workshop: Workshop, four_steps: Path, tmp_path: Path
) -> None:
    """A job that is evicted is started again as it was: it was refused for its own later checkpoint."""
    saved = four_steps / "run" / "checkpoints"
    named = shutil.copytree(saved / "step-000004", tmp_path / "elsewhere" / "step-000004")
    by_name, folder = f"checkpoint.resume_from_checkpoint={named}", tmp_path / "new"
    workshop.job(CASE, folder, *LONGER, by_name).train()
    again = workshop.job(CASE, folder, *QUICK, "train.max_train_steps=7", by_name)
    again.train()
    assert f"this run began from {named}: it goes on from its own step-000006" in again.said
    other = f"checkpoint.resume_from_checkpoint={saved / 'step-000002'}"
    with pytest.raises(ConfigError, match="holds later checkpoints"):
        workshop.job(CASE, folder, *QUICK, other).train()
    shutil.rmtree(named)  # as its own run prunes it
    last = workshop.job(CASE, folder, *QUICK, "train.max_train_steps=8", by_name)
    last.train()
    assert f"this run began from {named}: it goes on from its own step-000007" in last.said
    with pytest.raises(ConfigError, match="there is no folder"):
        workshop.job(CASE, folder, *QUICK, f"{by_name}-other").train()


def test_a_named_checkpoint_does_not_go_on_among_the_results_of_another_run(
    workshop: Workshop, four_steps: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(four_steps, tmp_path / "copy"))
    shutil.rmtree(folder / "run" / "checkpoints")
    record = folder / "run" / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "seed": "5"}))
    before = files(folder / "run", "**/*")
    named = four_steps / "run" / "checkpoints" / "step-000004"
    with pytest.raises(ConfigError, match=r"train\.seed: it began with '5'"):
        workshop.job(CASE, folder, *LONGER, f"checkpoint.resume_from_checkpoint={named}").train()
    assert not different(files(folder / "run", "**/*"), before)


MEASURED = (
    "train.max_train_steps=4",
    "validation.every_steps=2",
    "validation.held_out=1",
    "validation.prompts=[]",
    "checkpoint.checkpointing_steps=2",
)
SEEDS = tuple(f"validation.seed={seed}" for seed in range(6))


def test_entries_that_are_damaged_late_are_all_found_and_lose_no_line(
    workshop: Workshop, tmp_path: Path
) -> None:
    cache = Path(shutil.copytree(workshop.cache, tmp_path / "cache"))
    straight = workshop.job(CASE, tmp_path / "straight", *MEASURED, cache=cache)
    straight.train()
    damaged: list[Path] = []

    def damage_late(phase: Phase, step: int | None, item_done: bool) -> None:
        if phase is Phase.TRAIN and item_done and step == 4 and not damaged:
            held = list_entries(job.context, job.samples.held_out)
            trained = list_entries(job.context, job.samples.training)
            keys = [*held.latents, trained.latents[0], trained.texts[1]]
            damaged.extend(held.cache.path(entry.kind, entry.key) for entry in keys)
            for path in damaged:
                flip(path)

    folder = tmp_path / "run"
    job = workshop.job(CASE, folder, *MEASURED, cache=cache, status=ToldStatus(folder, damage_late))
    with pytest.raises(DataError) as caught:
        job.train()
    assert {problem.where for problem in caught.value.problems} == {str(path) for path in damaged}
    assert len(damaged) == 3
    assert not any(path.exists() for path in damaged)
    assert steps_saved(job.folder)[-1] == "step-000004"
    again = workshop.job(CASE, folder, *MEASURED, cache=cache)
    again.train()
    assert any(line.endswith(" 3 encoded") for line in again.said)
    expected = numbers(straight.folder)
    measured_late = {"step": 4, "validation_loss": expected[-1].pop("validation_loss")}
    assert numbers(again.folder) == [*expected, measured_late]
    last = [line for line in straight.said if line.startswith("held-out loss") and "->" in line]
    assert last and last == [line for line in again.said if line.startswith("held-out loss") and "->" in line]
    assert not different(files(again.folder, "lora/*"), files(straight.folder, "lora/*"))


def test_samples_that_are_others_at_a_resume_are_named(workshop: Workshop, tmp_path: Path) -> None:
    options = (*MEASURED, "validation.held_out=0", "train.max_train_steps=2")
    samples = small_samples(tmp_path / "samples", range(5))
    job = workshop.job(CASE, tmp_path, *options, samples=samples)
    job.train()
    words = "data: .* are not as when the run began"
    names = [record.identifier for record in job.samples.training]
    pictures = sorted((samples / "pictures").glob("*.png"))
    pictures[0].with_suffix(".txt").write_text("another caption")
    for part in ("pictures", "controls"):
        (samples / part / pictures[1].name).rename(samples / part / "new.png")
    pictures[1].with_suffix(".txt").rename(samples / "pictures" / "new.txt")
    others = workshop.job(CASE, tmp_path, *options, samples=samples)
    new = next(one.identifier for one in others.samples.training if one.identifier not in names)
    told = rf"{words} \(new: {new}; gone: {names[1]}; changed: {names[0]}\)"
    with pytest.raises(ConfigError, match=told):
        others.train()
    with pytest.raises(ConfigError, match=rf"{words} \(.*gone: .* and \d other"):
        workshop.job(CASE, tmp_path, *options, "validation.held_out=4", samples=samples).train()
    (job.folder / SAMPLES_FILE).unlink()  # of a run that an older version began
    with pytest.raises(ConfigError, match=rf"{words}\n"):
        others.train()


def test_the_seed_that_draws_what_is_held_out_is_named_where_it_changed(
    workshop: Workshop, tmp_path: Path
) -> None:
    short = (*MEASURED, "train.max_train_steps=2")
    workshop.job(CASE, tmp_path, *short).train()
    picked = {seed: workshop.job(CASE, tmp_path, *MEASURED, seed) for seed in SEEDS}
    other = next(job for job in picked.values() if job.samples.held_out != picked[SEEDS[0]].samples.held_out)
    with pytest.raises(ConfigError, match=r"\(validation\.held_out, validation\.seed\)"):
        other.train()
    unheld = (*MEASURED, "validation.held_out=0")
    workshop.job(CASE, tmp_path / "free", *unheld, "train.max_train_steps=2").train()
    workshop.job(CASE, tmp_path / "free", *unheld, SEEDS[1]).train()  # draws previews alone


def test_the_best_and_the_log_of_a_finished_run_stay_where_all_is_trained_again(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Its checkpoints were removed; the new start ends before it has any."""
    done = workshop.job(CASE, tmp_path, *MEASURED)
    done.train()
    shutil.rmtree(done.folder / "checkpoints")
    before = {name: files(done.folder, name) for name in ("lora/*", "best/*", "metrics.jsonl")}
    for _ in range(2):  # what a start left that did not end is not kept
        with pytest.raises(KilledError):
            again = workshop.job(CASE, tmp_path, *MEASURED, status=dying_after(tmp_path, 1))
            again.train()
    assert files(done.folder, "lora/*") == before["lora/*"]
    kept = files(done.folder, "best.earlier/*")
    assert list(kept.values()) == list(before["best/*"].values()) and len(kept) == 3
    kept = files(done.folder, "metrics.jsonl.earlier")
    assert list(kept.values()) == list(before["metrics.jsonl"].values())
    assert len(list(done.folder.glob("*.earlier*"))) == 2
    assert not [line for line in again.said if "the run that ended here" in line]


def test_the_best_of_a_future_that_did_not_happen_is_removed(workshop: Workshop, tmp_path: Path) -> None:
    options = ("train.max_train_steps=6", *MEASURED[1:], "checkpoint.checkpointing_steps=3")
    folder = tmp_path / "run"
    with pytest.raises(KilledError):
        workshop.job(CASE, folder, *options, status=dying_after(folder, 5)).train()
    assert json.loads((folder / "run" / "best" / "best.json").read_text())["step"] == 4
    with pytest.raises(KilledError):
        job = workshop.job(CASE, folder, *options, status=dying_after(folder, 4))
        job.train()
    assert "resumed from step-000003" in job.said
    assert "best/ was kept at step 4, which this run has not reached: removed" in job.said
    assert not (folder / "run" / "best").exists()


def test_the_lowest_loss_is_that_of_the_checkpoint_where_other_settings_make_later_ones_higher(
    workshop: Workshop, tmp_path: Path
) -> None:
    """The best LoRA of the first way is of a later step; a rate that ruins it is told at a resume."""
    limits = ("checkpoint.checkpointing_steps=2", "checkpoint.checkpoints_total_limit=3")
    options = ("train.max_train_steps=6", *MEASURED[1:], *limits)
    folder = tmp_path / "run"
    workshop.job(CASE, folder, *options).train()
    best = folder / "run" / "best"
    assert json.loads((best / "best.json").read_text())["step"] == 6
    shutil.rmtree(folder / "run/checkpoints/step-000006")
    job = workshop.job(CASE, folder, *options, "train.learning_rate=0.5")
    job.train()
    rows = [row for row in numbers(job.folder) if row["step"] and "validation_loss" in row]
    lowest = min(rows, key=lambda row: row["validation_loss"])
    record = json.loads((best / "best.json").read_text())
    assert (record["step"], record["validation_loss"]) == (4, lowest["validation_loss"])
    assert any(line.startswith("best: step 4, held-out loss") for line in job.said)  # measured from its file


def test_a_run_goes_on_from_a_checkpoint_that_a_killed_save_left_aside(
    workshop: Workshop, four_steps: Path, six_steps: Path, tmp_path: Path
) -> None:
    """With one checkpoint kept it was the only one, and the run was started over."""
    folder = Path(shutil.copytree(four_steps, tmp_path / "copy"))
    saved = folder / "run" / "checkpoints"
    shutil.rmtree(saved / "step-000002")
    waits = (saved / "step-000004").rename(saved / ".step-000004.old")
    shutil.copytree(waits, saved / "step-000004.tmp")
    named = f"checkpoint.resume_from_checkpoint={saved / 'step-000004'}"
    with pytest.raises(ConfigError, match=r"there is no folder .*\n.*name .*/\.step-000004\.old: a save"):
        workshop.job(CASE, tmp_path / "other", *LONGER, named).train()
    job = workshop.job(CASE, folder, *LONGER)
    job.train()
    assert any(line.startswith("checkpoints/step-000004 is here again") for line in job.said)
    assert "resumed from step-000004" in job.said
    assert steps_saved(job.folder) == ["step-000004", "step-000006"]
    assert not waits.exists() and not (saved / "step-000004.tmp").exists()
    assert not different(files(job.folder, "lora/*"), files(six_steps, "lora/*"))
