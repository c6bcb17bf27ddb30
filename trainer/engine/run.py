"""One job from scan to proof, in the process that trains."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from trainer.config.secrets import redacted
from trainer.config.writing.dump import dump
from trainer.data.cache import DamagedEntryError, prune
from trainer.engine.building.build import build, load_base
from trainer.engine.building.fast import uncompiled
from trainer.engine.caching.cut_captions import tell_cut_captions
from trainer.engine.caching.entries import Entries, fill_cache, list_entries
from trainer.engine.caching.imported import import_entries
from trainer.engine.caching.samples import Samples, prompt_controls
from trainer.engine.context import Context, apply_backend_settings, peak_memory_bytes, take_peak
from trainer.engine.records import checkpoint, resume
from trainer.engine.records.journal import Journal, start_tracker
from trainer.engine.results import proof
from trainer.engine.results.full import export_full, prove_full
from trainer.engine.results.pictures import before_after, row, shown, write_png, write_strip
from trainer.engine.spec import Spec
from trainer.engine.training import best, loop
from trainer.engine.training.feed import varies
from trainer.engine.training.preview import draw_previews, drop_previews_after, sample, write_before_after
from trainer.engine.training.validation import HeldOut, held_out_entries
from trainer.errors import DivergedError
from trainer.files import atomic
from trainer.modeling.base.source import pinned
from trainer.planning.kept_decisions import PLAN_FILE
from trainer.telemetry import locks, log
from trainer.telemetry.rundir import LOCK_FILE
from trainer.telemetry.sinks.records import METRICS_LOG, held_out_line, read_metrics
from trainer.telemetry.status import Phase
from trainer.words.sizes import GIB


def cache_only(context: Context, samples: Samples, spec: Spec) -> None:
    """Encode everything that `train` would; then remove what this configuration does not use, if asked to."""
    apply_backend_settings(context)
    tell_cut_captions(context, samples.all)
    entries = list_entries(context, samples.all, samples.prompt_controls)
    if spec.import_folder:
        import_entries(context, entries, Path(spec.import_folder))
    report = fill_cache(context, entries, verify=spec.verify)
    if spec.prune:
        files, size = prune(entries.cache.folder, entries.keys())
        context.say(f"pruned {files} files, {size / GIB:.2f} GiB")
    context.say(f"cache complete in {context.cache_dir}: {report.reused + report.encoded} entries")


def train(context: Context, samples: Samples, spec: Spec) -> None:
    """Cache, build, resume, train, export and prove."""
    apply_backend_settings(context)
    with _only_run(context, spec):
        _train(context, samples, spec)


def _only_run(context: Context, spec: Spec) -> contextlib.AbstractContextManager[int]:
    """Hold the run folder. Raises as `locks.holding` when another process trains in it."""
    context.run_dir.mkdir(parents=True, exist_ok=True)

    def on_wait(text: str) -> None:
        if text:
            context.say(text)
        context.stop.raise_if_requested()
        context.status.beat(Phase.LOAD)

    return locks.holding(
        context.run_dir / LOCK_FILE,
        supervisor=os.getpid() if spec.supervisor_pid is None else spec.supervisor_pid,
        what="another run is using this folder",
        where=str(context.run_dir),
        remedy="wait for it, stop it, or choose another output_dir",
        on_wait=on_wait,
    )


def _train(context: Context, samples: Samples, spec: Spec) -> None:
    start = resume.start(context, samples.training)
    context = start.context
    resume.require_space(context)
    _write_run_files(context, spec, start)
    tell_cut_captions(context, samples.all)
    entries = list_entries(context, samples.training, samples.prompt_controls)
    held_out = held_out_entries(context, samples.held_out)
    report = fill_cache(context, list_entries(context, samples.all, samples.prompt_controls))
    caching_peak = take_peak(context.device)
    tracker = start_tracker(context)  # before minutes of loading
    built = build(context, varies(context, entries))
    before = _outputs_before(context, built.model)
    state = loop.State() if start.found is None else _resume(context, built.updater, *start.found)
    journal = Journal(context, Path(spec.runtime_dir), tracker)
    journal.metrics.cache_entries(reused=report.reused, encoded=report.encoded)
    journal.cut_back(state.step)
    _tell_changed_held_out(context, held_out)
    _drop_after(context, state.step)
    run = loop.Run(
        context=context,
        built=built,
        entries=entries,
        held_out=held_out,
        journal=journal,
        settings=context.family.settings(context.source, context.config),
        fingerprint=start.fingerprint,
        recorded_settings=start.settings,
    )
    with journal:
        with _damage_found_at_once(context, entries, held_out):
            loop.train(run, state)
        context.status.beat(Phase.SAVE)
        journal.phase(Phase.SAVE)
        with loop.beside_training(run):
            if context.config.method == "lora":
                summary = _finish_lora(context, built.model, held_out)
            else:
                summary = _finish_full(context, built.model, before)
            _last_preview(run, state)
        _say_peaks(context, caching_peak, peak_memory_bytes(context.device))
        _say_held_out(run)
        journal.phase(Phase.DONE)
        context.say(summary)


@contextlib.contextmanager
def _damage_found_at_once(
    context: Context, entries: Entries, held_out: HeldOut | None
) -> Generator[None, None, None]:
    """Where one entry of the cache is damaged, look at all others too: they would end a start each."""
    try:
        yield
    except DamagedEntryError as first:
        every = [*entries.all(), *(held_out.entries.all() if held_out is not None else ())]
        keys = sorted({(entry.kind, entry.key) for entry in every})
        context.say(f"a cache entry is damaged: reading all {len(keys)} to find others")

        def on_entry() -> None:
            context.stop.raise_if_requested()
            context.status.beat(Phase.CACHE)

        # the first one was removed when it was read, so it is found again, as gone
        others = [
            problem
            for error in entries.cache.remove_damaged(keys, on_entry)
            for problem in error.problems
            if problem.where not in {known.where for known in first.problems}
        ]
        if not others:
            raise
        raise DamagedEntryError([*first.problems, *others]) from first


def _outputs_before(context: Context, model: Any) -> list[torch.Tensor] | None:
    """What the base puts out, for a full fine-tune, which has nothing to take off; else None."""
    if context.config.method == "lora":
        return None
    with uncompiled(context):
        return proof.fixed_outputs(context, model)


def _drop_after(context: Context, step: int) -> None:
    """Remove what a process left that trained on after this step, and what it left half done."""
    if step == 0:
        best.forget(context)
    best.restore(context)
    best.forget_after(context, step)
    drop_previews_after(context, step)


def _tell_changed_held_out(context: Context, held_out: HeldOut | None) -> None:
    """Say on resume that the loss will jump for another reason than training; the run may go on."""
    rows = [row for row in read_metrics(context.run_dir / METRICS_LOG) if "validation_loss" in row]
    if held_out is not None and rows and rows[-1].get("validation_data") != held_out.data:
        context.say(
            f"the held-out images or settings changed: from here on the held-out loss does not compare with "
            f"that of step {rows[-1]['step']} and before"
        )


def _say_held_out(run: loop.Run) -> None:
    """What training did to the held-out loss, from the file so that it holds for resumed runs too."""
    line = held_out_line(read_metrics(run.context.run_dir / METRICS_LOG))
    if run.held_out is not None and line is not None:
        run.context.say(line)


def _say_peaks(context: Context, caching: int, training: int) -> None:
    """Measured against planned device memory: a plan that is wrong should be seen."""
    if context.device == "cpu":
        return
    rows = (
        ("caching", caching, context.plan.cache_memory),
        ("loading and training", training, context.plan.train_memory),
    )
    parts = [
        f"{name} {measured / GIB:.1f} GiB (planned {sum(row.bytes for row in planned) / GIB:.1f})"
        for name, measured, planned in rows
    ]
    context.say(f"device memory at its peak: {', '.join(parts)}")


def _resume(context: Context, updater: Any, folder: Path, snapshot: checkpoint.Snapshot) -> loop.State:
    context.status.beat(Phase.LOAD)
    weights = checkpoint.read_group(folder, "weights", context.device)
    updater.load(weights, checkpoint.read_group(folder, "optimizer", context.device), snapshot.step)
    context.say(f"resumed from {folder.name}")
    return loop.State(
        step=snapshot.step,
        interval_loss=snapshot.interval_loss,
        interval_steps=snapshot.interval_steps,
        saved_step=snapshot.step,
        saved_in=folder,
    )


def _write_run_files(context: Context, spec: Spec, start: resume.Start) -> None:
    record = json.dumps(start.fingerprint, indent=1, sort_keys=True) + "\n"
    atomic.write_text(context.run_dir / resume.RUN_FILE, record)
    config_file = context.run_dir / "config.resolved.yaml"
    if not (start.relabels and config_file.is_file()):
        atomic.write_text(config_file, redacted(dump(pinned(context.config, context.source))))
        atomic.write_text(context.run_dir / PLAN_FILE, redacted(spec.plan_text))
    decisions: dict[str, object] = {row.feature: row.value for row in context.plan.decisions}
    log.get("run").info("run folder %s", context.run_dir, extra={"fields": {"plan": decisions}})


def _finish_lora(context: Context, model: Any, held_out: HeldOut | None = None) -> str:
    if not proof.is_finite_adapter(model):
        raise DivergedError("the trained LoRA is not finite", where=str(context.run_dir))
    if context.plan.compile:
        # peft must not be imported before torchvision can be, see quiet_libraries
        from trainer.modeling.adapter.joined_lora import part_siblings

        # the proof is about the plain model that others load the file into
        part_siblings(model)
    path, comfyui, result = proof.export_lora(context, model)
    kept = best.prove(context, model, held_out, path)
    if kept:
        context.say(kept)
    if comfyui is None:
        return f"LoRA: {path}. Proved: {result}."
    return f"LoRA: {path} (diffusers), {comfyui} (ComfyUI). Proved: {result}."


def _finish_full(context: Context, model: Any, before: list[torch.Tensor] | None) -> str:
    assert before is not None
    effect = proof.relative_difference(proof.fixed_outputs(context, model), before)
    if not effect > 0.0:
        raise DivergedError(f"training did not change the model's output (effect {effect})")
    folder = export_full(context, model)
    count = prove_full(context, model, folder)
    return (
        f"Model: {folder}. Proved: all {count} tensors read back from disk bit for bit; "
        f"training changed the model's output by {100 * effect:.3g} %."
    )


def _last_preview(run: loop.Run, state: loop.State) -> None:
    """Previews of what was saved: the LoRA is the one loaded from its file."""
    path = draw_previews(run.context, run.built.model, run.entries, state.step)
    if path is not None:
        strip = write_strip(path.parent, up_to_step=state.step)
        run.journal.picture("previews", path, state.step)
        run.context.say(f"previews: {strip}")
        together = write_before_after(run.context, run.entries, state.step)
        if together is not None:
            run.context.say(f"before and after: {together}")


def sample_once(context: Context, spec: Spec) -> None:
    """Draw prompts with the base model and a LoRA file into one PNG."""
    apply_backend_settings(context)
    entries: Entries = list_entries(context, (), prompt_controls(context.family, context.config, ()))
    fill_cache(context, entries)
    if spec.lora_file:
        proof.check_file(Path(spec.lora_file))
    model = load_base(context)
    rows, titles = [], []
    if spec.before_after or not spec.lora_file:
        rows.append([shown(one) for one in sample(context, model, entries)])
        titles.append("base model")
    if spec.lora_file:
        proof.load_lora(context, model, Path(spec.lora_file))
        rows.append([shown(one) for one in sample(context, model, entries)])
        titles.append(Path(spec.lora_file).name)
    captions = [*map(redacted, context.config.validation.prompts)]
    picture = before_after(rows, captions, titles) if spec.before_after else row(rows[0], captions, titles[0])
    Path(spec.output_file).parent.mkdir(parents=True, exist_ok=True)
    write_png(picture, Path(spec.output_file))
    context.say(f"picture: {spec.output_file}")


def verify_file(context: Context, spec: Spec) -> None:
    """Repeat the LoRA proof on a fresh base."""
    apply_backend_settings(context)
    path = Path(spec.lora_file)
    layers = proof.check_file(path)
    context.say(f"file: {layers} layers, all finite, not zero")
    model = load_base(context)
    result = proof.verify_on_fresh_base(context, model, path)
    context.say(f"verified: {result}")
