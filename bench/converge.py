"""Compare what faster settings learn with what bf16 learns: one run under each, by losses and tensors.

    python -m bench converge --steps 300
    python -m bench converge train_configs/flux1_dev_lora.yaml --base BASE --blocks 4,8
    python -m bench converge --method full --jobs 5 --record docs/benchmarks/NAME.json

Each setting trains with the same seed, so the same samples, noise and noise levels come in the same order, in
a process of its own, some side by side. All are compared with the first, bf16 as diffusers wrote it: the mean
loss of the first and of the last fifty steps (a base of less precision predicts worse from the start: does it
learn less too?), how far single losses are apart, and the cosines of the final adapters and of their
gradients (the optimizer's first moments: the mean of the last ten or so).

With `--method full` all weights are trained, and FP8 beside bf16 is the question; bench/converge_full.py says
what is compared then. Without a configuration a small language model learns text.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import arguments as types
from bench import converge_full, jobs, processes
from tests.random_bases import byte_llama
from trainer.engine.records import checkpoint
from trainer.telemetry import losses
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics

PLAIN = ("features.compile=false", "features.weights=bf16", "features.compute=bf16")
COMPILED = ("features.compile=true", "features.weights=bf16", "features.compute=bf16")
SETTINGS: Mapping[str, Sequence[str]] = {
    "bf16 eager": (*PLAIN, "features.attention=math"),
    "bf16 eager, another seed": (*PLAIN, "features.attention=math", "train.seed=1"),
    "attention flash": (*PLAIN, "features.attention=flash"),
    "attention efficient": (*PLAIN, "features.attention=efficient"),
    "attention cudnn": (*PLAIN, "features.attention=cudnn"),
    "attention cudnn_strided": (*PLAIN, "features.attention=cudnn_strided"),
    "attention flash_attn_4": (*PLAIN, "features.attention=flash_attn_4"),
    "compiled": COMPILED,
    "compiled, budget 0.4": (*COMPILED, "features.activation_budget=0.4"),
    "fp8": ("features.compile=true", "features.compute=fp8"),
    "fp8 eager": ("features.compile=false", "features.compute=fp8"),
    "int8": ("features.compile=true", "features.weights=int8"),
    "nf4": ("features.compile=true", "features.weights=nf4"),
}
"""Overrides of each row by its name; the other rows are compared with the first."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train under every setting; print a line of JSON each."""
    options = _parsed(arguments)
    if options.method == "full":
        return converge_full.run(options)
    names = list(dict.fromkeys([next(iter(SETTINGS)), *(options.settings or SETTINGS)]))
    with tempfile.TemporaryDirectory(prefix="converge-", dir=options.work) as scratch:
        folder = Path(scratch)
        overrides = _common(options, folder)
        runs = processes.side_by_side(
            lambda name, environ: _train(options.config, name, overrides, folder, environ),
            names,
            jobs=options.jobs,
        )
        if "problem" in runs[0]:
            print(f"{names[0]}: {runs[0]['problem']}", file=sys.stderr)
            return 1
        rows = [{"setting": name, **compared(run, runs[0])} for name, run in zip(names, runs, strict=True)]
    for row in rows:
        print(json.dumps(row), flush=True)
    types.write_rows(options.record, rows)
    return 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    of_full = types.listed("settings with --method full", converge_full.SETTINGS)
    parser = types.command_parser("converge", __doc__, f"{types.listed('settings', SETTINGS)}\n{of_full}")
    parser.add_argument("config", type=Path, nargs="?", help="the quickstart's, or a small language model")
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--steps", type=types.positive, help="300; 400 of the small language model")
    parser.add_argument("--base", type=Path, help="in place of the configuration's, with random weights")
    parser.add_argument("--blocks", type=types.counts, help="cut that base: its blocks of each kind, 4,8")
    parser.add_argument("--size", choices=byte_llama.SIZES, default="small", help="of the language model")
    parser.add_argument("--text-bytes", type=types.positive, default=converge_full.TEXT_BYTES)
    types.add_choices(parser, "--settings", dict.fromkeys([*SETTINGS, *converge_full.SETTINGS]))
    types.add_common(parser, "--set", "--jobs", "--record", "--work", "--month")
    options = parser.parse_args(arguments)
    if options.blocks and not options.base:
        parser.error("--blocks cuts the base that --base names: give both")
    known = converge_full.SETTINGS if options.method == "full" else SETTINGS
    unknown = [name for name in options.settings or () if name not in known]
    if unknown:
        parser.error(f"--method {options.method} has no setting {unknown[0]}; it has {'; '.join(known)}")
    if options.method == "full" and options.base and not options.config:
        parser.error("--base takes the place of a configuration's: name the configuration")
    if options.method == "lora":
        options.config = options.config or Path("train_configs/quickstart.yaml")
        options.steps = options.steps or 300
    return options


def _common(options: argparse.Namespace, folder: Path) -> list[str]:
    """Overrides of every run: one length, one line a step, no previews, bf16."""
    overrides = [
        f"train.max_train_steps={options.steps}",
        f"checkpoint.checkpointing_steps={options.steps}",
        "train.log_every_steps=1",
        "model.dtype=bf16",
        "validation.prompts=[]",
        f"validation.every_steps={options.steps}",
        f"data.cache_dir={folder / 'cache'}",
    ]
    if options.base:
        overrides += jobs.random_base(options.config, options.base, folder, options.blocks or ())
    return [*overrides, *options.overrides]


def _train(
    config: Path, name: str, overrides: Sequence[str], folder: Path, environ: Mapping[str, str]
) -> dict[str, Any]:
    """One run: its losses, adapter and moments, or `problem`."""
    run = folder / name.replace(" ", "_").replace(",", "")
    ended = jobs.train([config], run, (*overrides, *SETTINGS[name]), environ, 0)
    lines = ended.said.strip().splitlines()
    if ended.code:
        return {"problem": next((line for line in lines if "error:" in line), f"exit code {ended.code}")}
    last = checkpoint.steps_on_disk(run / "checkpoints")[-1]
    return {
        "losses": [row["loss"] for row in read_metrics(run / METRICS_LOG) if "loss" in row],
        "adapter": checkpoint.read_group(last, "weights", "cpu"),
        "moments": {
            name: tensor
            for name, tensor in checkpoint.read_group(last, "optimizer", "cpu").items()
            if name.endswith("/exp_avg")
        },
        "proved": any("Proved" in line for line in lines),
    }


def compared(run: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a run compared with those of the reference."""
    if "problem" in run:
        return {"problem": run["problem"]}
    return {
        **losses.compare(run["losses"], reference["losses"]),
        "adapter_cosine": round(_cosine(run["adapter"], reference["adapter"]), 5),
        "gradient_cosine": round(_cosine(run["moments"], reference["moments"]), 5),
        "proved": run["proved"],
    }


def _cosine(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    names = sorted(left)
    one, other = (torch.cat([part[name].double().flatten() for name in names]) for part in (left, right))
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0).item())
