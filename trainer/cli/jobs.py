"""Floor 7: what commands that start the training process share: plan, spec, supervisor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from trainer.config.load import Loaded
    from trainer.engine.spec import Mode
    from trainer.hardware.plan import Plan


def run_job(
    loaded: Loaded,
    plan: Plan,
    mode: Mode,
    *,
    lora_file: str = "",
    output_file: str = "",
    port: int | None = None,
    unified_memory: bool = False,
) -> int:
    """Hand one job to the training process, watch over it, and return its exit code."""
    from trainer.config import environment
    from trainer.config.load import dump
    from trainer.engine.spec import Spec, write_spec
    from trainer.hardware.render import plan_to_json
    from trainer.telemetry import atomic
    from trainer.telemetry.supervisor import supervise

    runtime_dir = environment.runtime_dir()
    runtime_dir.mkdir(parents=True, exist_ok=True)
    folder = runtime_dir / mode
    folder.mkdir(exist_ok=True)
    config_file = folder / "config.yaml"
    atomic.write_text(config_file, dump(loaded.config))
    spec = Spec(
        mode=mode,
        config_file=str(config_file),
        plan_text=plan_to_json(plan),
        runtime_dir=str(runtime_dir),
        cache_dir=str(environment.cache_dir(loaded.config)),
        lora_file=lora_file,
        output_file=output_file,
    )
    write_spec(spec, folder / "spec.json")
    return supervise(
        [sys.executable, "-m", "trainer.engine", str(folder / "spec.json")],
        environment={**environment.snapshot(), **plan.environment},
        runtime_dir=runtime_dir,
        port=port,
        unified_memory=unified_memory,
    )


def existing_file(value: Path) -> Path:
    """The path, absolute; click has checked that it exists."""
    return value.resolve()


def print_plan(plan: Plan) -> None:
    """The plan as people read it, on stderr: stdout belongs to results."""
    from trainer.hardware.render import plan_text

    click.echo(plan_text(plan), err=True)
