"""`bench converge --method full`: whether full fine-tunes with products in FP8 learn what bf16 learns.

    python -m bench converge --method full --jobs 5 --record docs/benchmarks/NAME.json
    python -m bench converge train_configs/flux1_dev_full.yaml --method full --base BASE --blocks 4,8

Without a configuration a small language model reads the docstrings of installed packages byte by byte, from
random weights. With one its family trains on tests/data/real_shaped, where `--set data.sets` names no other.
All runs are `trainer train`, a step a micro-batch, compared with the first, which is bf16, compiled:

- the mean loss of the last fifty steps: within 1 % of bf16's, and no farther from it than another seed's;
- gradients of each layer alone (bench/gradients.py), before the first step and with the weights that bf16
  ended with: the cosine with the fp32 product of the same inputs and output gradients is at least 0.99;
- those of whole passes, of the same weights on the same samples, are told beside them: the rounding of all
  layers adds up over a model's depth. Those of bf16 without compiling show what the order of sums does.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import converge_record as records
from bench import gradients, jobs, processes, texts
from bench.processes import REPOSITORY
from tests.random_bases import byte_llama
from trainer import families
from trainer.cli.jobs import child_environment
from trainer.cli.measure import planned
from trainer.cli.options import Layers
from trainer.errors import TrainerError
from trainer.telemetry import losses
from trainer.telemetry.measurement import Curves
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics

_BF16, _FP8 = "features.compute=bf16", "features.compute=fp8"
_COMPILED = "features.compile=true"
SETTINGS: Mapping[str, Sequence[str]] = {
    "bf16": (_COMPILED, _BF16),
    "bf16, another seed": (_COMPILED, _BF16, "train.seed=1"),
    "fp8": (_COMPILED, _FP8, "features.weight_gradient=fp8"),
    "fp8, weight gradient in bf16": (_COMPILED, _FP8, "features.weight_gradient=bf16"),
    "bf16 eager": ("features.compile=false", _BF16),
}
"""Overrides of each row by its name; the others are compared with the first. Another seed has other weights
to start from where these are random, another order of samples, and other noise.
"""
FP8, SEEDS = "fp8", ("bf16, another seed",)
"""The beginning of the names of settings that are judged, and those that differ by chance alone."""
STEPS = {"text": 400, "pictures": 300}
TEXT_BYTES = 6_000_000
_TEXT = (
    "data.max_sequence_length=2048",
    "train.train_batch_size=4",
    "train.learning_rate=6e-4",
)
"""Rows of 8,192 bytes a step, which 400 steps do not read twice."""
_PICTURES = (
    "data.resolution=512",
    "train.train_batch_size=1",
    "train.learning_rate=1e-4",
)
_HELD_OUT_PICTURES = 8


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model and the data of all runs."""

    name: str
    config: Path
    overrides: tuple[str, ...]
    steps: int
    text: str
    """For people: what is trained, on what."""


def run(options: argparse.Namespace) -> int:
    """Train and compare; print a line of JSON a setting, then the verdicts. 1 where one does not hold."""
    names = list(dict.fromkeys([next(iter(SETTINGS)), *(options.settings or SETTINGS)]))
    with tempfile.TemporaryDirectory(prefix="converge-", dir=options.work) as scratch:
        folder = Path(scratch)
        chosen = (subject if options.config else language_model)(options, folder)
        runs = Runs(chosen, folder)
        found = processes.side_by_side(runs.one, names, jobs=options.jobs)
    if "losses" not in found[0]:
        print(f"{names[0]}: {found[0]['problem']}", file=sys.stderr)
        return 1
    rows = records.rows_of(dict(zip(names, found, strict=True)), SEEDS)
    print(records.printed(rows), flush=True)
    judged = [row for row in rows if row["setting"].startswith(FP8)]
    print("\n".join(records.sentence(row) for row in judged), file=sys.stderr)
    if options.record:
        every = losses.steps_per_point(chosen.steps)
        drawn = {
            name: losses.curve(one["losses"], every)
            for name, one in zip(names, found, strict=True)
            if "losses" in one
        }
        title = f"What a full fine-tune learns in FP8: {chosen.name}, {chosen.steps} steps"
        curves = Curves(steps=every, losses=drawn)
        records.write(options.record, chosen.text, rows, curves, title=title, month=options.month)
    return 0 if all(map(records.holds, judged)) else 1


def language_model(options: argparse.Namespace, folder: Path) -> Subject:
    """A small Llama with random weights, and the text of documentation."""
    base = folder / "base"
    byte_llama.build(options.size, base)
    text = texts.write_texts(folder / "text", most_bytes=options.text_bytes)
    steps = options.steps or STEPS["text"]
    own = (
        f"model.pretrained_model_name_or_path={base}",
        "model.weights=random",
        f"data.sets=[{{chat_file: {text.chat_file}}}]",
        f"validation.chat_file={text.held_out_file}",
        "validation.held_out=0",
        *_TEXT,
    )
    sizes = byte_llama.SIZES[options.size]
    said = (
        f"A Llama of {sizes['num_hidden_layers']} layers, {sizes['hidden_size']} wide, from random weights,"
        f" reads {text.source}, as bytes, in rows of 8,192 a step; held-out losses are of other modules."
    )
    overrides = (*_common(steps, folder), *own, *options.overrides)
    config = REPOSITORY / "train_configs" / "llama_full.yaml"
    return Subject(name="a small language model", config=config, overrides=overrides, steps=steps, text=said)


def subject(options: argparse.Namespace, folder: Path) -> Subject:
    """A configuration, with random weights where a base is given."""
    family = families.get(Layers((options.config,)).load().config.family)
    steps, data = options.steps or STEPS["pictures"], REPOSITORY / "tests" / "data" / "real_shaped"
    if family.sample_kind == "conversation":
        own: tuple[str, ...] = (f"data.sets=[{{chat_file: {data / 'chats.jsonl'}}}]",)
    elif family.control_counts[0]:
        controls = f"img_dir: {data / 'edits'}, control_dir: {data / 'controls'}"
        own = (f"data.sets=[{{{controls}}}]", *_PICTURES)
    else:
        own = (f"data.sets=[{{img_dir: {data / 'pictures'}}}]", *_PICTURES)
    blocks = ",".join(map(str, options.blocks or ()))
    name = family.title + (f", cut to {blocks} blocks" if blocks else "")
    said = f"{name}, on tests/data/real_shaped."
    if options.base:
        own += tuple(jobs.random_base(options.config, options.base, folder, options.blocks or ()))
        said = said.replace(", on", ", from random weights, on")
    own += (f"validation.held_out={_HELD_OUT_PICTURES}",)
    overrides = (*_common(steps, folder), *own, *options.overrides)
    return Subject(name=name, config=options.config, overrides=overrides, steps=steps, text=said)


def _common(steps: int, folder: Path) -> tuple[str, ...]:
    """Overrides of every run: bf16, one length, a tenth of it warm-up, a micro-batch a step, a line of the
    log for each, no previews, and no checkpoints, which are four times the model's size.
    """
    return (
        f"train.max_train_steps={steps}",
        f"train.lr_warmup_steps={steps // 10}",
        "train.gradient_accumulation_steps=1",
        "train.log_every_steps=1",
        f"checkpoint.checkpointing_steps={steps + 1}",
        "parallel.gpus=1",
        "model.dtype=bf16",
        "validation.prompts=[]",
        f"validation.every_steps={steps}",
        f"data.cache_dir={folder / 'cache'}",
    )


class Runs:
    """The runs of a subject under each setting; all but the first wait for the gradients of that one."""

    def __init__(self, chosen: Subject, folder: Path) -> None:
        self._subject, self._folder = chosen, folder
        self._reference = next(iter(SETTINGS))
        self._measured: Future[dict[str, Any]] = Future()
        """The reference's gradients lie in the folder, once this has a result."""

    def one(self, name: str, environ: Mapping[str, str]) -> dict[str, Any]:
        """Train under a setting, then compare gradients: its losses and cosines, or `problem`."""
        found: dict[str, Any] = {"problem": "it was not run"}
        try:
            found = self._train(name, environ)
            if "problem" not in found and not any(one.startswith("train.seed") for one in SETTINGS[name]):
                found |= self._compare(name, environ)
        finally:
            if name == self._reference:
                self._measured.set_result(found)
        return found

    def _train(self, name: str, environ: Mapping[str, str]) -> dict[str, Any]:
        folder = self._run_of(name)
        overrides = (*self._subject.overrides, *SETTINGS[name])
        ended = jobs.train([self._subject.config], folder, overrides, environ, 0)
        if ended.code:
            return {"problem": _reason(ended)}
        rows = read_metrics(folder / METRICS_LOG)
        held_out = [row["validation_loss"] for row in rows if "validation_loss" in row]
        if name != self._reference:  # its weights are a state in which gradients are compared
            shutil.rmtree(folder / "model")
        return {
            "losses": [row["loss"] for row in rows if "loss" in row],
            "held_out": held_out[-1] if held_out else None,
            "proved": "Proved" in ended.said,
        }

    def _compare(self, name: str, environ: Mapping[str, str]) -> dict[str, Any]:
        """`gradients` by state, or the problem of the process that made them."""
        reference = name == self._reference
        if not reference and "gradients" not in self._measured.result():
            return {}
        own, kept = self._folder / f"{self._run_of(name).name}-gradients", self._folder / "gradients"
        for made in (own, kept):
            made.mkdir(exist_ok=True)
        overrides = (*self._subject.overrides, *SETTINGS[name])
        try:
            loaded = Layers((self._subject.config,), overrides, None, own / "run").load()
            facts, plan = planned(loaded, probe=False)
        except TrainerError as error:
            return {"problem": f"gradients: {error}"}
        component = families.get(loaded.config.family).trained_component
        trained = self._run_of(self._reference) / "model" / component
        ended = jobs.call(
            gradients.measure,
            loaded,
            plan,
            own,
            {
                "states": {
                    "start": {"step": 0, "weights": ""},
                    "trained": {"step": self._subject.steps, "weights": str(trained)},
                },
                "kept": str(kept),
                "reference": reference,
            },
            environ={**child_environment(plan, facts), **_shown(environ)},
            log=own / "log.txt",
            cache=loaded.config.data.cache_dir,
        )
        return {"problem": f"gradients: {_reason(ended)}"} if ended.code else {"gradients": ended.answer}

    def _run_of(self, name: str) -> Path:
        return self._folder / name.replace(" ", "_").replace(",", "")


def _shown(environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that shows a process its GPU."""
    return {key: value for key, value in environ.items() if key == processes.VISIBLE}


def _reason(ended: processes.Ended) -> str:
    """The reason why a process failed, of its log; the log's end goes to stderr."""
    lines = ended.said.strip().splitlines()
    print("\n".join(lines[-15:]), file=sys.stderr)
    at = next((number for number, line in enumerate(lines) if line.startswith("error")), None)
    return f"exit code {ended.code}" if at is None else " ".join(lines[at : at + 2])[:300]
