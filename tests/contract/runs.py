"""Whole runs on tiny bases inside the test's process, and what they leave behind."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml
from PIL import Image, ImageOps

from tests.tiny import TINY_MODELS
from trainer import families
from trainer.config.reading.load import load
from trainer.data.records import ImageRecord
from trainer.data.sampler import SampleRef
from trainer.engine import run
from trainer.engine.caching.samples import Samples, scan_samples
from trainer.engine.context import Context
from trainer.engine.spec import Spec
from trainer.engine.training import feed, loop
from trainer.files import codec
from trainer.machine.reading import read_recorded
from trainer.modeling.base.source import resolve_source
from trainer.modeling.vision import make_torchvision_importable
from trainer.planning.planning import plan_run
from trainer.telemetry.status import Phase, StatusWriter
from trainer.telemetry.stop import StopFlag

ROOT = Path(__file__).resolve().parent.parent.parent
CPU_FACTS = ROOT / "tests" / "golden" / "machines" / "cpu.json"
STEPS = 10
CHECKPOINT_STEP = 5

SMALL_RUN: dict[str, Any] = {
    "data": {"resolution": 64, "caption_dropout_rate": 0.3, "max_sequence_length": 16},
    "train": {
        "max_train_steps": STEPS,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "lr_warmup_steps": 0,
        "log_every_steps": 3,  # an interval of the log spans the checkpoint
        "seed": 3,
    },
    "validation": {
        "prompts": ["an apple", "a red car"],
        "every_steps": 3,
        "num_inference_steps": 2,
        "held_out": 1,
    },
    "checkpoint": {"checkpointing_steps": CHECKPOINT_STEP, "checkpoints_total_limit": 2},
}
"""Ten steps that cross everything a resume has to get right: accumulation, dropout, half a log interval."""

SHORT_STEPS = 6
SHORT_CHECKPOINT = 3
SHORT_RUN: dict[str, Any] = {
    **SMALL_RUN,
    "train": {
        **SMALL_RUN["train"],
        "max_train_steps": SHORT_STEPS,
        "log_every_steps": 2,  # an interval of the log spans the checkpoint
    },
    "validation": {**SMALL_RUN["validation"], "every_steps": 4},
    "checkpoint": {"checkpointing_steps": SHORT_CHECKPOINT, "checkpoints_total_limit": 2},
}
"""The same within six steps: a round of previews between the checkpoint and the end, one at each end."""

SECTIONS_OF_METHOD: dict[str, dict[str, Any]] = {"lora": {"lora": {"rank": 4, "alpha": 8}}, "full": {}}
"""An alpha that is not the rank, so that a file that forgets the scale is found out."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table that these tests walk."""

    family: str
    method: Literal["lora", "full"]

    def __str__(self) -> str:
        return f"{self.family}-{self.method}"


CASES = tuple(Case(family=family, method=method) for family in TINY_MODELS for method in ("lora", "full"))
LORA_CASES = tuple(case for case in CASES if case.method == "lora")
FULL_CASES = tuple(case for case in CASES if case.method == "full")
ALIKE = ("mistral", "qwen2")
"""Families that are Llama in all but a bias, or nothing: what they do is tried always in tests/numerics, in
contract tests with the slow ones, and not again where it takes long and asks about no layer of a model."""
COUSINS = ("flux1_kontext", "qwen_image_edit", "qwen3")
"""Families that share all of the engine's ways with another one: whole runs of theirs are slow tests but for
a few, and left out where it takes long and asks about no batch and no model."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run that is ready to start."""

    context: Context
    samples: Samples
    spec: Spec
    said: list[str]

    @property
    def folder(self) -> Path:
        return self.context.run_dir

    @property
    def records(self) -> tuple[ImageRecord, ...]:
        return self.samples.all

    def train(self) -> None:
        run.train(self.context, self.samples, self.spec)


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """Bases, samples and one cache for all runs, so that each picture is encoded once."""

    base: Callable[[str], Path]
    samples: Path
    """Folder that `small_samples` wrote."""
    cache: Path
    run: Mapping[str, Any] = dataclasses.field(default_factory=lambda: SMALL_RUN)
    """Sections of the YAML that every run has."""

    def write_config(self, case: Case, folder: Path, samples: Path | None = None) -> Path:
        """The small run's YAML in `folder`, which will also hold the run; `samples` as in `one_set`."""
        content = {
            "family": case.family,
            "method": case.method,
            "output_dir": str(folder / "run"),
            **self.run,
            **SECTIONS_OF_METHOD[case.method],
            "model": {"pretrained_model_name_or_path": str(self.base(case.family)), "download": "never"},
        }
        data, validation = {**self.run["data"]}, {**self.run["validation"]}
        if not draws(case.family):
            del data["resolution"], validation["num_inference_steps"]
            data |= {"caption_dropout_rate": 0.0, "max_sequence_length": 112}
            validation |= {"max_new_tokens": 8}  # what takes the time of a small run
        content["validation"] = validation
        content["data"] = {**data, "sets": [one_set(case.family, samples or self.samples)]}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    def job(
        self,
        case: Case,
        folder: Path,
        *overrides: str,
        samples: Path | None = None,
        cache: Path | None = None,
        status: StatusWriter | None = None,
    ) -> Job:
        """The run of `folder`: a new one, or the resumed one when it was started before."""
        path = self.write_config(case, folder, samples)
        return job_of(path, folder, *overrides, cache=cache or self.cache, status=status)


def job_of(
    config_file: Path, folder: Path, *overrides: str, cache: Path, status: StatusWriter | None = None
) -> Job:
    """The run of a configuration, planned for the recorded CPU; what is not the run itself is in `folder`."""
    known = {name: families.get(name) for name in families.names()}
    loaded = load(
        [config_file],
        overrides=overrides,
        family_defaults={name: family.defaults for name, family in known.items()},
        lora_presets={name: tuple(family.lora_targets) for name, family in known.items()},
        environ={},
    )
    plan = plan_run(loaded, read_recorded(CPU_FACTS))
    config, family, said = loaded.config, known[loaded.config.family], []
    folder.mkdir(parents=True, exist_ok=True)
    spec = Spec(
        mode="train",
        config=config.model_dump(),
        plan_text=codec.to_json(plan),
        runtime_dir=str(folder / "runtime"),
        cache_dir=str(cache),
        meeting_place=str(folder / "meeting"),
    )
    components = families.components(family)
    context = Context(
        config=config,
        plan=plan,
        family=family,
        source=resolve_source(config, components, trained=family.trained_component),
        cache_dir=cache,
        status=status or StatusWriter(Path(spec.runtime_dir)),
        stop=StopFlag(),
        say=said.append,
    )
    return Job(context=context, samples=scan_samples(family, config), spec=spec, said=said)


def draws(family: str) -> bool:
    """True for a family that makes pictures, False for one that writes text."""
    return families.get(family).sample_kind == "image"


def fewer(cases: Sequence[Case]) -> list[Any]:
    """`mostly_slow` without `ALIKE` and `COUSINS`: for what the engine does alike for every family."""
    return mostly_slow(without(cases, ALIKE, COUSINS))


def mostly_slow(cases: Sequence[Case]) -> list[Any]:
    """All of these cases, marked slow but for the first one, and the first of a family that writes instead of
    drawing.
    """
    always = {cases[0], next((case for case in cases if not draws(case.family)), cases[0])}
    return [pytest.param(case, marks=() if case in always else pytest.mark.slow) for case in cases]


def without(cases: Sequence[Case], *families: Sequence[str]) -> list[Case]:
    """The cases of all families but these: `ALIKE`, `COUSINS`."""
    left_out = {name for some in families for name in some}
    return [case for case in cases if case.family not in left_out]


def edits(family: str) -> bool:
    """True for a family whose samples have control images."""
    return families.get(family).control_counts[0] > 0


def one_set(family: str, samples: Path) -> dict[str, str]:
    """The item of `data.sets`, or what `validation` names, for a folder that `small_samples` wrote."""
    if not draws(family):
        return {"chat_file": str(samples / "chats.jsonl")}
    controls = {"control_dir": str(samples / "controls")} if edits(family) else {}
    return {"img_dir": str(samples / "pictures"), **controls}


def held_out_options(family: str, samples: Path) -> list[str]:
    """`--set` values that measure the validation loss on these samples."""
    return [f"validation.{key}={value}" for key, value in one_set(family, samples).items()]


def keep_edits_small(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Have a pipeline that scales every picture before the edit to a megapixel scale it to a few instead."""
    make_torchvision_importable()
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

    set_attribute(plus, "VAE_IMAGE_SIZE", 64 * 64)


def keep_kontexts_small(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """Do the same to the pipeline that scales one to the nearest of some sizes of a megapixel."""
    from diffusers.pipelines.flux import pipeline_flux_kontext as kontext

    small = [(48, 112), (64, 96), (64, 80), (64, 64), (80, 64), (96, 64), (112, 48)]
    set_attribute(kontext, "PREFERRED_KONTEXT_RESOLUTIONS", small)


def small_samples(folder: Path, chosen: Sequence[int] = range(7)) -> Path:
    """Example pictures, one of them cut to another bucket, with a control image each, and as many
    conversations.
    """
    pictures, controls = folder / "pictures", folder / "controls"
    for made in (pictures, controls):
        made.mkdir(parents=True)
    found = sorted((ROOT / "examples" / "style").glob("*.png"))[:7]
    for number in chosen:
        path = found[number]
        picture = Image.open(path).convert("RGB")
        if number == len(found) - 1:
            picture = picture.crop((0, 0, picture.width, picture.height // 2))
        picture.save(pictures / path.name)
        ImageOps.invert(picture).save(controls / path.name)
        (pictures / path.name).with_suffix(".txt").write_text(path.with_suffix(".txt").read_text())
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"How many are {number} and {number}?"},
                {"role": "assistant", "content": " and ".join(["one"] * (number + 1))},
            ]
        }
        for number in chosen
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


Step = tuple[tuple[SampleRef, ...], ...]
"""Samples of an optimizer step, by micro-batch."""


class KilledError(Exception):
    """Stands for the end of the process: nothing in the trainer catches it."""


class ToldStatus(StatusWriter):
    """A heartbeat that calls `on_beat(phase, step, item_done)` after each beat: tests act at that moment."""

    def __init__(self, folder: Path, on_beat: Callable[[Phase, int | None, bool], None]) -> None:
        super().__init__(folder / "runtime")
        self._on_beat = on_beat

    def beat(
        self,
        phase: Phase,
        *,
        step: int | None = None,
        total: int | None = None,
        item_done: bool = False,
        median_step_seconds: float | None = None,
    ) -> None:
        super().beat(phase, step=step, total=total, item_done=item_done)
        self._on_beat(phase, step, item_done)


def dying_after(folder: Path, last_step: int) -> ToldStatus:
    """Ends the run, as a kill would, when step `last_step` is complete."""

    def on_beat(phase: Phase, step: int | None, item_done: bool) -> None:
        if phase is Phase.TRAIN and item_done and step == last_step:
            raise KilledError

    return ToldStatus(folder, on_beat)


def copy_until(done: Job, step: int, folder: Path) -> None:
    """Copy a finished run into `folder`, as a kill leaves one that got to its end after this checkpoint: it
    still has every line and picture, and neither a result nor a later checkpoint.
    """
    run_dir = Path(shutil.copytree(done.folder, folder / done.folder.name))
    for path in (run_dir / "checkpoints").iterdir():
        if path.name > f"step-{step:06d}":
            shutil.rmtree(path)
    assert steps_saved(run_dir)[-1] == f"step-{step:06d}"
    for name in ("lora", "model"):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    (run_dir / "before_after.png").unlink(missing_ok=True)


def losing(job: Job, *, factor: float) -> Job:
    """The job with a loss that is so many times as large."""
    family = job.context.family

    class Losing:
        def __getattr__(self, name: str) -> Any:
            return getattr(family, name)

        def loss(self, *arguments: Any) -> torch.Tensor:
            return family.loss(*arguments) * factor

    return dataclasses.replace(job, context=dataclasses.replace(job.context, family=Losing()))


def record_samples(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Samples of every step that runs take from now on, in their order."""
    taken: list[Step] = []

    def recorded(*arguments: Any) -> Iterator[Any]:
        for step in feed.feed(*arguments):
            taken.append(tuple(fed.micro_batch for fed in step))
            yield step

    monkeypatch.setattr(loop, "feed", recorded)
    return taken


def numbers(folder: Path) -> list[dict[str, float]]:
    """Rows of the run's metrics.jsonl without what a clock measured."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "learning_rate", "grad_norm", "validation_loss")
    return [{name: row[name] for name in names if name in row} for row in rows]


def products(folder: Path) -> dict[str, bytes]:
    """Bytes of everything that a run made, by its path: LoRA or model, proofs, and pictures."""
    return files(folder, "lora/*", "model/**/*", "samples/**/*", "before_after.png")


def files(folder: Path, *patterns: str) -> dict[str, bytes]:
    """Bytes of the files that match, by path."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(found)}


def steps_saved(folder: Path) -> list[str]:
    """Names of what lies in the run's folder of checkpoints."""
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


def different(left: dict[str, bytes], right: dict[str, bytes]) -> Sequence[str]:
    """Paths that one of the two lacks or that differ; a message that bytes would not make readable."""
    return sorted(name for name in {*left, *right} if left.get(name) != right.get(name))


def require_near(
    ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], *, rate: float
) -> None:
    """AssertionError where weights that AdamW moved at this rate differ by more than sums in another order
    make them: by a hundredth of one step, the root of the mean square in each tensor.

    AdamW moves a weight by the sign of its gradient at first: one whose gradient is all but zero may go the
    other way, and no bound of a single weight below a step would be safe.
    """
    assert ours.keys() == theirs.keys()
    apart = {name: (ours[name] - theirs[name]).float() for name in ours}
    means = {name: one.square().mean().sqrt().item() for name, one in apart.items()}
    worst = max(means, key=means.__getitem__)
    assert means[worst] < 0.01 * rate, f"{worst} differs by {means[worst]:.1e}"
    assert max(one.abs().max().item() for one in apart.values()) < rate
