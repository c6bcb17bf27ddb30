"""The variants of a comparison, and the values that are the same in all of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.judging.rules import unused_keys
from trainer.config.reading.varied import overrides_of_each
from trainer.config.schema import RunConfig, changed
from trainer.errors import ConfigError
from trainer.planning.plan import Plan

LETTERS = "ABCDEFGH"
SEED = "train.seed"
SEEDS = 2**32
"""Seeds that `train.seed` may have, from 0 on."""
_CACHE = "data.cache_dir"
SHARED: Mapping[str, Any] = {
    "train.log_every_steps": 1,
    "train.report_to": "tensorboard",
    "checkpoint.resume_from_checkpoint": "never",
    "validation.prompts": (),
    "validation.control_images": (),
    "validation.control_dir": None,
    "validation.img_dir": None,
    "validation.chat_file": None,
    "validation.columns": None,
    "validation.dataset_info": None,
    "validation.name": None,
    "validation.held_out": 0,
    "validation.every_steps": 1_000_000,
    "validation.metrics": (),
    "validation.early_stop": None,
}
"""Values of every run: a line of the log for each step, no previews and held-out losses, nothing sent out."""
_LENGTHS = ("train.max_train_steps", "train.num_train_epochs")
_PER_RUN = (
    *_LENGTHS,
    "checkpoint.checkpointing_steps",
    _CACHE,
    "output_dir",
)
"""Keys that a comparison writes itself, besides those of SHARED."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One configuration of a comparison as it is planned here."""

    letter: str
    title: str
    """Its file's name, or the values by which it differs: `features.compute=fp8`."""
    config: RunConfig
    plan: Plan
    """The plan of the user's own run, however long that is."""
    own_seed: bool = False
    """Whether seeds are compared: else all runs have the first variant's."""

    @property
    def name(self) -> str:
        """Letter and title: `B features.compute=fp8`."""
        return f"{self.letter} {self.title}"


def varied(given: Sequence[str]) -> list[tuple[str, ...]]:
    """The overrides of each variant from the texts of `--vary`, as `overrides_of_each` reads them.

    Raises ConfigError also for keys that a comparison decides.
    """
    found = overrides_of_each(given)
    for key in (text.partition("=")[0] for text in given):
        if key in SHARED or key in _PER_RUN:
            what = f"{key} is set by the comparison itself"
            remedy = "--steps, --warmup and --learn set lengths" if key in _LENGTHS else "vary another key"
            raise ConfigError(what, where="--vary", remedy=remedy)
    return found


def measured_config(variant: Variant, steps: int, *, seed: int, cache: Path) -> RunConfig:
    """The configuration of a run of so many steps.

    `auto` compiles runs that are long enough to gain by it, which a measurement is not: what the plan of the
    user's own run chose is written.
    """
    values = {
        **SHARED,
        "train.max_train_steps": steps,
        "train.num_train_epochs": None,
        "train.lr_warmup_steps": min(variant.config.train.lr_warmup_steps, steps - 1),
        "checkpoint.checkpointing_steps": steps + 1,
        SEED: seed,
        _CACHE: cache,
        "features.compile": variant.plan.compile,
    }
    return changed(variant.config, values)


def settings(config: RunConfig) -> dict[str, str]:
    """Values by dotted key as text, but for those that are without effect, and the same in all runs."""
    left_out = {*SHARED, *_PER_RUN, *unused_keys(config)}
    found: dict[str, str] = {}
    whole = config.model_dump(mode="json")
    # of a data set the keys that say something, not its twelve
    whole["data"]["sets"] = [one.model_dump(mode="json", exclude_defaults=True) for one in config.data.sets]
    for key, value in whole.items():
        section = (
            {f"{key}.{name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
        )
        found |= {name: str(one) for name, one in section.items() if name not in left_out}
    return found
