"""Training jobs without a supervisor and a data set: their files, their context, bases cut to some blocks."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import arguments as types
from bench import processes
from bench.hosts import launcher
from bench.processes import Ended
from trainer import families
from trainer.cli.measure import planned
from trainer.cli.options import Layers
from trainer.config import environment
from trainer.config.reading.load import Loaded
from trainer.config.schema import RunConfig
from trainer.engine.spec import Spec, read_spec, write_spec
from trainer.errors import AccessError, ConfigError
from trainer.files import codec
from trainer.planning.plan import Plan

if TYPE_CHECKING:
    from trainer.engine.context import Context

BLOCK_KEYS = ("num_layers", "num_single_layers", "num_visual_blocks", "num_text_blocks", "num_hidden_layers")
"""Keys of a model's config.json that count its repeated blocks, in the order of `--blocks`."""


def write_job(loaded: Loaded, plan: Plan, folder: Path, cache: Path | None = None) -> Path:
    """Write a training job whose files all lie in `folder`, but for a `cache` that it shares; gives the path
    of its spec.
    """
    (folder / "runtime").mkdir(exist_ok=True)
    spec = Spec(
        mode="train",
        config=loaded.config.model_dump(),
        plan_text=codec.to_json(plan),
        runtime_dir=str(folder / "runtime"),
        cache_dir=str(cache or folder / "cache"),
        meeting_place=str(folder / "meeting"),
    )
    write_spec(spec, folder / "spec.json")
    return folder / "spec.json"


def call_run(
    job: Callable[..., Any],
    configs: Sequence[Path],
    overrides: Sequence[str],
    given: Mapping[str, Any],
    *,
    probe: bool,
    blocks: Sequence[int] = (),
    log: Path | None = None,
) -> Ended:
    """Call `job` with the spec of a run that is planned here, in a process with the plan's environment.

    With `probe` kernels without a verdict are measured before; `blocks` cuts the base to random weights.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        loaded = Layers(configs, overrides, None, folder / "run").load()
        if blocks:
            base = Path(str(loaded.config.model.pretrained_model_name_or_path))
            cut = cut_base(loaded.config.family, base, folder / "base", blocks)
            more = (f"model.pretrained_model_name_or_path={cut}", "model.weights=random")
            loaded = Layers(configs, (*overrides, *more), None, folder / "run").load()
        return call(job, loaded, planned(loaded, probe=probe)[1], folder, given, log=log)


def call(
    job: Callable[..., Any],
    loaded: Loaded,
    plan: Plan,
    folder: Path,
    given: Mapping[str, Any],
    *,
    environ: Mapping[str, str] | None = None,
    log: Path | None = None,
    cache: Path | None = None,
) -> Ended:
    """Call `job` with the spec of a planned run, whose files go into `folder`; see `processes.call`."""
    spec = write_job(loaded, plan, folder, cache)
    child = plan.child_environment(environ or environment.snapshot())
    return processes.call(job, {"spec": spec, **given}, child, log)


def train(
    configs: Sequence[Path],
    run: Path,
    overrides: Sequence[str],
    environ: Mapping[str, str],
    port: int,
    *,
    tree: Path = processes.REPOSITORY,
    hosts: int = 1,
) -> Ended:
    """Run `trainer train` of the checkout `tree` into `run`; its log and runtime folder are beside that.

    `hosts` is how many stand-ins for hosts share the work (bench/hosts.py).
    """
    words = ["-m", "trainer", "train", *map(str, configs), "--output", str(run)]
    command = launcher(hosts)(words) if hosts > 1 else [sys.executable, *words]
    command += [word for override in overrides for word in ("--set", override)]
    own = {"TRAINER_RUNTIME_DIR": f"{run}.runtime", "TRAINER_METRICS_PORT": str(port)}
    return processes.run(command, {**environ, **own}, run.with_name(f"{run.name}.txt"), cwd=tree)


def make_context(spec_path: str) -> Context:
    """The context of a run as `trainer.engine` makes it, without supervisor and data set."""
    from trainer.engine.context import Context, apply_backend_settings
    from trainer.modeling.base.source import resolve_source
    from trainer.modeling.quiet import quiet_libraries
    from trainer.telemetry.status import StatusWriter
    from trainer.telemetry.stop import StopFlag

    spec = read_spec(Path(spec_path))
    config = RunConfig.model_validate(spec.config)
    quiet_libraries()
    family = families.get(config.family)
    context = Context(
        config=config,
        plan=codec.from_json(Plan, spec.plan_text, "plan.json"),
        family=family,
        source=resolve_source(config, families.components(family), trained=family.trained_component),
        cache_dir=Path(spec.cache_dir),
        status=StatusWriter(Path(spec.runtime_dir)),
        stop=StopFlag(),
        say=lambda line: print(line, file=sys.stderr),
    )
    apply_backend_settings(context)
    return context


def random_base(config: Path, base: Path, folder: Path, counts: Sequence[int]) -> list[str]:
    """Overrides for random weights of a base's configs, cut to `counts` blocks where there are some.

    Raises as `block_keys`.
    """
    base = types.require_base(base, "--base")
    if counts:
        base = cut_base(Layers((config,)).load().config.family, base, folder / "base", counts)
    return [f"model.pretrained_model_name_or_path={base}", "model.weights=random"]


def cut_base(family_name: str, base: Path, folder: Path, counts: Sequence[int]) -> Path:
    """A copy of a base model's configs whose trained component has `counts` blocks of each kind.

    Raises as `block_keys`.
    """
    keys = block_keys(family_name, base, counts)
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    path = folder / families.get(family_name).trained_component / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(zip(keys, counts, strict=False))))
    return folder


def block_keys(family_name: str, base: Path, counts: Sequence[int]) -> list[str]:
    """The keys by which a base's trained component counts its blocks, one for each of `counts` at least.

    Raises AccessError where there is no such base, ConfigError for more counts than keys.
    """
    keys = list(block_counts(family_name, base))
    if len(counts) > len(keys):
        raise ConfigError(
            f"{len(counts)} counts, but {family_name} counts {', '.join(keys) or 'no blocks'}",
            where="--blocks",
            remedy="give as many numbers as there are kinds of blocks, or fewer",
        )
    return keys


def block_counts(family_name: str, base: Path) -> dict[str, int]:
    """Repeated blocks of a base's trained component by the key that counts them.

    Raises AccessError without a base.
    """
    path = types.require_base(base, "--blocks") / families.get(family_name).trained_component / "config.json"
    if not path.is_file():
        raise AccessError(
            "there is no such file", where=str(path), remedy=f"is this a base of {family_name}?"
        )
    config = json.loads(path.read_text())
    return {key: int(config[key]) for key in BLOCK_KEYS if key in config}
