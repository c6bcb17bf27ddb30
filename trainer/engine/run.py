"""The four jobs of the process that trains: train, fill the cache, draw samples, verify a LoRA file."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import os
from pathlib import Path
from typing import Any

import torch

from trainer.config.secrets import redacted
from trainer.config.writing.dump import dump
from trainer.data.leftout import write_left_out
from trainer.engine.building.build import Built, build, load_base, require_start
from trainer.engine.building.fast import uncompiled
from trainer.engine.caching.entries import Entries, data_fingerprint, list_entries
from trainer.engine.caching.fill import fill_cache, tell_cut_captions
from trainer.engine.caching.imported import import_entries
from trainer.engine.caching.in_use import prune_unused, reading
from trainer.engine.caching.lengths import fit_lengths
from trainer.engine.caching.samples import Samples, prompt_controls
from trainer.engine.caching.store import DamagedEntryError
from trainer.engine.context import Context, apply_backend_settings
from trainer.engine.hosts import folders
from trainer.engine.hosts.link import tell_link
from trainer.engine.records import resume, samples_file
from trainer.engine.records.journal import Journal, start_tracker
from trainer.engine.results import proof
from trainer.engine.results.file_check import check_file
from trainer.engine.results.full import export_full
from trainer.engine.results.no_effect import explained
from trainer.engine.results.pictures import before_after, compared, first_of, row, shown, smaller, write_png
from trainer.engine.spec import Spec
from trainer.engine.training import loop, orders, rounds, state
from trainer.engine.training.drawing import draw_try
from trainer.engine.training.epochs import with_steps
from trainer.engine.training.feed import varies
from trainer.engine.training.flops import counter
from trainer.engine.training.graphs import Graphs
from trainer.engine.training.held_out import HeldOut, held_out_entries, prove_best, restore_best
from trainer.engine.training.preview import draw_previews, drop_previews_after, sample, write_before_after
from trainer.engine.training.scores import make_scorer, score_previews
from trainer.errors import DataError, EndedTogether, PeerLostError, Problem
from trainer.files import atomic, codec
from trainer.modeling.base.source import pinned
from trainer.modeling.storage.shared_memory import peak_bytes
from trainer.planning.choose import encoding
from trainer.telemetry import locks, log
from trainer.telemetry.run_folder import process
from trainer.telemetry.run_folder.plan import PLAN_FILE
from trainer.telemetry.rundir import CONFIG_FILE, LOCK_FILE
from trainer.telemetry.sinks.records import METRICS_LOG, held_out_line, read_metrics
from trainer.telemetry.status import Phase
from trainer.words.plurals import numbered
from trainer.words.sizes import GIB


def do(context: Context, samples: Samples, spec: Spec) -> None:
    """Do the job that the spec is of."""
    with reading(context) if spec.mode in ("train", "sample") else contextlib.nullcontext():
        if spec.mode == "train":
            train(context, samples, spec)
        elif spec.mode == "cache":
            cache_only(context, samples, spec)
        elif spec.mode == "sample":
            sample_once(context, spec)
        else:
            verify_file(context, spec)


def cache_only(context: Context, samples: Samples, spec: Spec) -> None:
    """Encode everything that `train` would; then, if asked to, remove entries that this run does not use."""
    apply_backend_settings(context)
    context = folders.found(context)
    samples = fit_lengths(context, samples)
    _require_one_set(context, samples)
    leads = context.ranks.rank == context.fills[0]
    if context.ranks.first:
        tell_cut_captions(context, samples.all)
    entries = list_entries(context, samples.all, samples.prompt_controls)
    if spec.import_folder and leads:
        import_entries(context, entries, Path(spec.import_folder))
    report = fill_cache(context, entries, verify=spec.verify)
    if spec.prune and leads:
        prune_unused(context, entries)
    complete = numbered(report.reused + report.encoded, "entry", "entries")
    context.say(f"cache complete in {context.cache_dir}: {complete}")


def train(context: Context, samples: Samples, spec: Spec) -> None:
    """Cache, build, resume, train, export and prove. Raises as `locks.holding`."""
    apply_backend_settings(context)
    context.run_dir.mkdir(parents=True, exist_ok=True)

    def on_wait(text: str) -> None:
        if text:
            context.say(text)
        context.alive(Phase.LOAD)

    if not context.ranks.first:  # the folder is rank 0's to hold
        _train(context, samples, spec)
        return
    with locks.holding(
        context.run_dir / LOCK_FILE,
        supervisor=os.getpid() if spec.supervisor_pid is None else spec.supervisor_pid,
        taken=Problem(
            what="another run is using this folder",
            where=str(context.run_dir),
            remedy="wait for it, stop it, or choose another output_dir",
        ),
        on_wait=on_wait,
    ):
        if spec.supervisor_pid is not None:  # a process of its own; it may have waited without a log there
            log.setup(context.run_dir)
        _train(context, samples, spec)


def _train(context: Context, samples: Samples, spec: Spec) -> None:
    context = folders.found(context)
    samples = fit_lengths(context, samples)
    _require_one_set(context, samples)
    require_start(context)
    context = with_steps(context, samples.training)
    start = _start(context, samples)
    context = start.context
    scorer = make_scorer(context, samples)
    if context.ranks.first:
        resume.require_space(context)
        _write_run_files(context, spec, start, samples)
        if samples.left_out:  # with the conversations that are too long
            write_left_out(samples.left_out, context.run_dir)
        tell_cut_captions(context, samples.all)
    entries = list_entries(context, samples.training, samples.prompt_controls)
    held_out = held_out_entries(context, samples.held_out)
    report = fill_cache(context, list_entries(context, samples.all, samples.prompt_controls))
    # held, not handed out: memory that a CUDA graph will use again is free to nobody else
    caching_peak = torch.cuda.max_memory_reserved()  # 0 on a CPU
    if context.device != "cpu":  # loading and training start from their own peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    context.status.device_memory = peak_bytes
    tracker = start_tracker(context) if context.ranks.first else None  # before minutes of loading
    context.ranks.connect(context.device)
    writes = context.ranks.first and not start.relabels
    tell_link(context, context.run_dir / PLAN_FILE if writes else None)
    built = build(context, varies(context, entries))
    context, before = built.context, None
    if context.config.method == "full":  # its proof has no adapter to take off
        with uncompiled(context):
            before = proof.fixed_outputs(context, built.model)
    now, work = state.restore(context, built.updater, start), _work(context, built, entries, held_out)
    if not context.ranks.first:
        _follow(work, now, before)
        return
    journal = Journal(context, Path(spec.runtime_dir), tracker)
    journal.metrics.cache_entries(reused=report.reused, encoded=report.encoded)
    journal.cut_back(now.step)
    _tell_other_held_out(context, held_out)
    restore_best(context, now.step)
    drop_previews_after(context, now.step)
    run = state.Run(**vars(work), journal=journal, start=start, scorer=scorer)
    with journal:
        try:
            loop.train(run, now)
        except DamagedEntryError as error:
            raise _all_damaged(run, error) from error
        _finish(run, now.step, caching_peak, before)


def _tell_other_held_out(context: Context, held_out: HeldOut | None) -> None:
    """Say where losses that were measured so far are of other samples, other settings or another version."""
    rows = [row for row in read_metrics(context.run_dir / METRICS_LOG) if "validation_loss" in row]
    if held_out is not None and rows and rows[-1].get("validation_data") != held_out.data:
        context.say(
            "the held-out samples or their settings changed, or an earlier version measured: from here on the"
            f" held-out loss does not compare with that of step {rows[-1]['step']} and before"
        )


def _require_one_set(context: Context, samples: Samples) -> None:
    """Raise DataError where the ranks, each of which reads the data set, did not find the same samples."""
    if context.ranks.size == 1:
        return
    if len(set(context.ranks.gathered(data_fingerprint(samples.all)))) > 1:
        if context.ranks.hosts > 1 and (what := folders.first_other_sample(context, samples.all)):
            remedy = "copy the data set again, or name a folder that all hosts see; names count as well"
            raise DataError(what, where="data.sets", remedy=remedy)
        raise DataError(
            "the data set changed while the processes of this run read it: they found different samples",
            where="data.sets",
            remedy="let nothing write to its folders, then start again",
        )


def _start(context: Context, samples: Samples) -> resume.Start:
    """The start that rank 0 finds, on every rank: a checkpoint that appears meanwhile cannot part them."""
    if context.ranks.size == 1:
        return resume.start(context, samples.training)
    found: dict[str, Any] = {}
    if context.ranks.first:
        start = resume.start(context, samples.training)
        found = {**vars(start), "context": start.context.plan.text_encoder_weights}
    found = context.ranks.from_first(found)
    # the rest of the plan is this host's own
    plan = encoding.kept(context.plan, found["context"])
    start = resume.Start(**{**found, "context": dataclasses.replace(context, plan=plan)})
    return folders.with_checkpoint(context, start)


def _work(context: Context, built: Built, entries: Entries, held_out: HeldOut | None) -> state.Work:
    """The parts of an optimizer step, with CUDA graphs where the plan says so."""
    compute = functools.partial(loop.compute, context, built)
    predict = functools.partial(loop.predict, context, built)
    graphs = None
    if context.plan.cuda_graphs:
        between = None if built.staged is None else built.staged.empty
        graphs = Graphs(compute, predict, context.say, between=between)
    flops = counter(context, entries)
    return state.Work(
        context=context, built=built, graphs=graphs, entries=entries, held_out=held_out, flops=flops
    )


def _finish(run: state.Run, step: int, caching_peak: int, before: list[torch.Tensor] | None) -> None:
    """Export and prove the result, draw it, and say how the run ended."""
    context, model = run.context, run.built.model
    context.status.beat(Phase.SAVE)
    run.journal.publish()
    with rounds.beside_training(run), explained(run.built.updater):
        if before is None:
            path, comfyui, result = proof.export_lora(context, model, step)
            prove_best(context, model, run.held_out, path)
            _hand_out(context, path)
            files = f"{path}" if comfyui is None else f"{path} (diffusers), {comfyui} (ComfyUI)"
            summary = f"LoRA: {files}. Proved: {result}."
        else:
            summary = _finish_full(context, run.built, before)
        strip = draw_previews(run, step)  # of the saved result: the LoRA is the one loaded from its file
        if strip is not None:
            context.say(f"previews: {strip}")
        write_before_after(context, run.entries, step, drawn=strip is not None)
    orders.answer_rest(run, step)
    score_previews(run, step)
    if context.device != "cpu" and context.status.device_memory:  # a plan that is wrong should be seen
        plan, training = context.plan, context.status.device_memory()
        parts = [
            f"{name} {measured / GIB:.1f} GiB (planned {sum(row.bytes for row in planned) / GIB:.1f})"
            for name, measured, planned in (
                ("caching", caching_peak, plan.cache_memory),
                ("loading and training", training, plan.train_memory),
            )
        ]
        context.say(f"device memory at its peak: {', '.join(parts)}")
    # from the file, so that it holds for resumed runs too
    line = held_out_line(read_metrics(context.run_dir / METRICS_LOG))
    if run.held_out is not None and line is not None:
        context.say(line)
    run.journal.publish()
    context.say(summary)


def _hand_out(context: Context, path: Path) -> Path:
    """The LoRA's file of rank 0 as this host has it, where previews are drawn with it."""
    if context.config.validation.prompts:
        return folders.handed(context, path)
    return context.ranks.from_first(path)


def _follow(work: state.Work, now: state.State, before: list[torch.Tensor] | None) -> None:
    """Train as rank 0 does, and draw this rank's previews of the result, with the LoRA from the file that
    rank 0 wrote and proved; of a full fine-tune this rank exports and proves its rows. Raises EndedTogether
    once rank 0 has saved and is gone.
    """
    context, model = work.context, work.built.model
    try:
        loop.follow(work, now)
        if before is not None:
            with rounds.beside_training(work):
                _finish_full(context, work.built, before)
                if context.config.validation.prompts:
                    sample(context, model, work.entries, context.ranks)
            return
        path = _hand_out(context, context.run_dir)
        if context.config.validation.prompts:
            with rounds.beside_training(work):
                proof.take_back(context, model, path)
                sample(context, model, work.entries, context.ranks)
    except EndedTogether:
        if context.ranks.hosts == 1:  # of several each host ends by itself
            with contextlib.suppress(PeerLostError):
                context.ranks.meet()
        raise


def _all_damaged(run: state.Run, first: DamagedEntryError) -> DamagedEntryError:
    """Look at all entries of the cache once one is damaged: the others would end a start each."""
    context, entries = run.context, run.entries
    every = [*entries.all(), *(run.held_out.entries.all() if run.held_out is not None else ())]
    keys = sorted({(entry.kind, entry.key) for entry in every})
    context.say(f"a cache entry is damaged or gone: reading all {len(keys)} to find others")
    known = {problem.where for problem in first.problems}
    # the first one was removed when it was read, so it is found again, as gone
    errors = entries.cache.remove_damaged(keys, lambda: context.alive(Phase.CACHE))
    others = [one for error in errors for one in error.problems if one.where not in known]
    return DamagedEntryError([*first.problems, *others])


def _write_run_files(context: Context, spec: Spec, start: resume.Start, samples: Samples) -> None:
    supervisor = os.getpid() if spec.supervisor_pid is None else spec.supervisor_pid
    process.begin(context.run_dir, supervisor=supervisor, runtime_dir=Path(spec.runtime_dir))
    atomic.write_text(context.run_dir / resume.RUN_FILE, resume.record_text(start))
    samples_file.write(samples.training, context.run_dir)
    config_file = context.run_dir / CONFIG_FILE
    if not (start.relabels and config_file.is_file()):
        atomic.write_text(config_file, redacted(dump(pinned(context.config, context.source))))
        atomic.write_text(context.run_dir / PLAN_FILE, redacted(codec.to_json(context.plan)))
    plan: dict[str, object] = {row.feature: row.value for row in context.plan.decisions}
    logging.getLogger("trainer.run").info("run folder %s", context.run_dir, extra={"fields": {"plan": plan}})


def _finish_full(context: Context, built: Built, before: list[torch.Tensor]) -> str:
    """Export and prove a full fine-tune, of which all ranks have rows; gives the line about it."""
    model, rows = built.model, built.updater.in_rows
    effect = proof.relative_difference(proof.fixed_outputs(context, model), before)
    with context.ranks.together():
        unchanged = "training does not change the model's output"
        proof.require_effect(effect, unchanged, str(context.run_dir))
    folder, count = export_full(context, model, rows)
    return (
        f"Model: {folder}. Proved: all {count} tensors read back from disk bit for bit; "
        f"training changed the model's output by {100 * effect:.3g} %."
    )


def sample_once(context: Context, spec: Spec) -> None:
    """Draw prompts with the base model and a LoRA file, or a full fine-tune's model, into one PNG; or a try
    into its folder.
    """
    if spec.try_folder:
        draw_try(context, Path(spec.try_folder))
        return
    apply_backend_settings(context)
    entries = list_entries(context, (), prompt_controls(context.family, context.config, ()))
    fill_cache(context, entries)
    file, target = Path(spec.lora_file), Path(spec.output_file)
    if spec.lora_file:
        check_file(file)
    rows, titles, fitted = [], [], compared if spec.before_after else shown
    if spec.before_after or not spec.model_folder:
        model = load_base(context).module
        if spec.before_after or not spec.lora_file:
            rows.append([fitted(one) for one in sample(context, model, entries)])
            titles.append("base model")
        if spec.lora_file:
            proof.load_lora(context, model, file)
            rows.append([fitted(one) for one in sample(context, model, entries)])
            titles.append(file.name)
        del model
    if spec.model_folder:
        gc.collect()
        torch.cuda.empty_cache()  # the base model's place
        model = load_base(_with_model(context, Path(spec.model_folder))).module
        rows.append([fitted(one) for one in sample(context, model, entries)])
        titles.append(_title(Path(spec.model_folder)))
    captions = [*map(redacted, context.config.validation.prompts)]
    picture = before_after(rows, captions, titles) if spec.before_after else row(rows[0], captions, titles[0])
    target.parent.mkdir(parents=True, exist_ok=True)
    write_png(picture, target)
    told = first_of(len(captions)) if spec.before_after else smaller(rows[0])
    context.say(f"picture: {spec.output_file}{told}")


def _with_model(context: Context, folder: Path) -> Context:
    """The context with the trained component of a full fine-tune's folder; all others are the base's."""
    trained = context.family.trained_component
    built = context.source.random_components - {trained}
    source = dataclasses.replace(context.source, folder=folder, random_components=built)
    return dataclasses.replace(context, source=source)


def _title(model: Path) -> str:
    """A full fine-tune's name: that of its run, where it lies in one."""
    return f"{model.parent.name}/{model.name}" if model.name == "model" else model.name


def verify_file(context: Context, spec: Spec) -> None:
    """Repeat the LoRA proof on a fresh base; the outputs of training are not needed."""
    apply_backend_settings(context)
    path = Path(spec.lora_file)
    context.say(f"file: {numbered(check_file(path), 'layer')}, all finite, not zero")
    model = load_base(context).module
    untouched = proof.fixed_outputs(context, model)
    proof.load_lora(context, model, path)
    context.say(f"verified: {proof.prove_lora(context, model, path, untouched=untouched)}")
