"""Values that were written, and that the family or the machine does not take: one row each.

The configuration's own rules are in `config.judging`. Planning runs both, on what was written and on whatever
is suggested instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from trainer.config import environment
from trainer.config.judging.checks import check
from trainer.config.judging.found import Context
from trainer.config.reading.load import Loaded
from trainer.config.schema import DataSet
from trainer.errors import ConfigError, Problem
from trainer.families.family import Family
from trainer.planning.choose import attention, candidates, loading, optimizers, swapping, switches
from trainer.planning.choose.situation import Situation, value_of
from trainer.planning.shapes.adapters import needs_whole_base
from trainer.ways.storages import WAYS
from trainer.words import extras

Case = TypeVar("Case")


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[Case]):
    """What speaks against a value that was written.

    Its texts may name `{at}`, the case; `{key}` and `{asked}`, its value; `{clash}`, what `clashes` gave.
    """

    keys: tuple[str, ...]
    """Where it is told; `*` stands for the number of each set."""
    clashes: Callable[[Case], object]
    """True, or a text, where it does."""
    what: str = "{clash}"
    remedy: str | Callable[[Case], str] = "leave {key} out"


class Written(NamedTuple):
    """The value of one key, and the family that is to take it."""

    family: Family
    key: str
    value: Any

    @property
    def talks(self) -> bool:
        """Whether the family learns from conversations, not from images."""
        return self.family.sample_kind == "conversation"


_ABOUT_IMAGES = {
    "mask_dir": "a language model learns from the assistant's words, and takes no mask besides",
    "loss_weight": "the loss is a mean over tokens: write `repeats` to weigh a set",
    "is_reg": "there is no trigger word to keep away",
    "flip": "a conversation cannot be mirrored",
    "random_crop": "a conversation is never cut",
}
"""Keys of a set that are about images -> why a conversation has none of it."""
FAMILY: tuple[Rule[Written], ...] = (
    Rule(
        keys=("data.sets.*.chat_file", "validation.chat_file"),
        clashes=lambda at: not at.talks and at.value is not None,
        what="{at.family.title} trains on images",
        remedy="write `img_dir: DIR`, or use another family",
    ),
    Rule(
        keys=("data.sets.*.img_dir", "validation.img_dir"),
        clashes=lambda at: at.talks and at.value is not None,
        what="{at.family.title} trains on conversations",
        remedy="write `chat_file: FILE.jsonl`, or use another family",
    ),
    Rule(
        keys=("data.sets.*.control_dir", "validation.control_dir", "validation.control_images"),
        clashes=lambda at: not at.family.control_counts[1] and at.value not in (None, ()),
        what="{at.family.title} takes no control images",
        remedy="leave it out",
    ),
    Rule(
        keys=("data.max_sequence_length",),
        clashes=lambda at: at.value > at.family.max_sequence_length,
        what="{at.family.title} takes {at.family.max_sequence_length} tokens at most",
        remedy="write {at.family.max_sequence_length} or less",
    ),
    Rule(
        keys=("data.caption_dropout_rate",),
        clashes=lambda at: at.talks and at.value,
        what="a conversation has no caption to leave out",
        remedy="write 0",
    ),
    Rule(
        keys=("data.trigger_word",),
        clashes=lambda at: at.talks and at.value,
        what="a conversation has no caption to put a word before",
        remedy="leave it out",
    ),
    Rule(
        keys=tuple(f"data.sets.*.{name}" for name in _ABOUT_IMAGES),
        clashes=lambda at: at.talks and _if_not_standard(at.key.rpartition(".")[2], at.value),
        what="{at.family.title} trains on conversations, and {clash}",
        remedy="leave it out",
    ),
)


def _if_not_standard(name: str, value: object) -> str:
    return _ABOUT_IMAGES[name] if value != vars(DataSet())[name] else ""


_WEIGHTS, _COMPUTE, _MODULATION = "features.weights", "features.compute", "features.modulation"
_BLOCKS, _BETA_2, _DECAY = "features.activation_checkpointing", "train.adam_beta2", "train.weight_decay"
_FULL_FILES = "or use the model's full-precision files"
_FP32 = "or write features.weights: fp32, which needs twice the memory"


def _base_config(at: Situation) -> str:
    """The file that says how the checkpoint is stored."""
    component = next(part.name for part in at.geometry.components if part.role == "trained")
    return "/".join(filter(None, (at.config.model.pretrained_model_name_or_path, component, "config.json")))


def _stored(at: Situation) -> str:
    """What a checkpoint that is quantised already says of itself; empty for others."""
    stored = at.geometry.stored_as
    return f"{_base_config(at)} says that the weights are stored in {stored}" if stored else ""


def _missing(at: Situation) -> str:
    what = candidates.not_stored(at, replace(candidates.asked_way(at), modulation=""))
    return f"{_base_config(at)}: {what}" if what and at.geometry.stored_as else what


def _no_modulation(at: Situation) -> str:
    way, beside = candidates.asked_way(at), at.config.features.modulation
    apart = beside in WAYS and not way.trains and not way.packs
    return candidates.not_stored(at, replace(way, modulation=beside)) if apart else ""


def _uncompiled(at: Situation) -> str:
    way = candidates.asked_way(at)
    clashes = switches.compile_key(at) and candidates.uncompiled(at, way)
    return f"{way.weights} weights cannot be compiled: {candidates.no_product(at, way)}" if clashes else ""


def _installed(at: Situation, way_name: str, key: str) -> str:
    """How the package of a way is installed, else to leave the key out."""
    way = WAYS[way_name]
    return extras.remedy(way.extra) if at.lacks(way.package) else f"leave {key} out"


MACHINE: tuple[Rule[Situation], ...] = (
    Rule(keys=(swapping.KEY,), clashes=swapping.refused),
    Rule(
        keys=(_BLOCKS,),
        clashes=lambda at: (
            isinstance(at.asked(_BLOCKS), int) and at.asked(_BLOCKS) > max(1, at.geometry.blocks)
        ),
        what="{asked} blocks are to be recomputed, the model has {at.geometry.blocks}",
        remedy="write {at.geometry.blocks} at most, or true for all",
    ),
    Rule(
        keys=("features.tf32",), clashes=lambda at: at.asked("features.tf32") is True and switches.no_tf32(at)
    ),
    Rule(
        keys=(optimizers.KEY,),
        clashes=lambda at: at.lacks(optimizers.PACKAGES.get(at.asked(optimizers.KEY), "")),
        what="{asked} needs {clash}, which is not installed",
        remedy=lambda at: (
            f"{extras.remedy(at.asked(optimizers.KEY).replace('_', '-'))}; or leave {optimizers.KEY} out"
        ),
    ),
    Rule(
        keys=(optimizers.KEY,),
        clashes=lambda at: at.asked(optimizers.KEY) != "adamw" and optimizers.trains_in_bf16(at),
        what="{asked} would round its updates to bf16, which loses the small ones",
        remedy="leave {key} out: AdamW with compensated sums needs no more memory than fp32 copies",
    ),
    Rule(
        keys=(_BETA_2,),
        clashes=lambda at: (
            optimizers.kahan(at)
            and at.asked(_BETA_2) not in ("auto",)
            and at.asked(_BETA_2) > optimizers.IN_BF16[0]
        ),
        what="{asked:g} is too slow for a full fine-tune in bf16: " + optimizers.SECOND_MOMENT,
        remedy=f"write {optimizers.IN_BF16[0]:g} at most, leave {_BETA_2} out, {_FP32}",
    ),
    Rule(
        keys=(_DECAY,),
        clashes=lambda at: optimizers.kahan(at) and at.asked(_DECAY) not in ("auto", 0.0),
        what="{asked:g} would do nothing in a full fine-tune in bf16: " + optimizers.NO_DECAY,
        remedy=f"write 0, leave {_DECAY} out, {_FP32}",
    ),
    Rule(keys=(attention.KEY,), clashes=attention.cannot_run),
    Rule(keys=(attention.KEY,), clashes=attention.not_installed, remedy=attention.installed_by),
    Rule(
        keys=(loading.KEY,),
        clashes=lambda at: at.asked(loading.KEY) == loading.PACKAGE and loading.not_here(at),
    ),
    Rule(
        keys=(switches.COMPILE,),
        clashes=lambda at: at.asked(switches.COMPILE) is True and switches.compile_obstacle(at),
        remedy="install it, or leave {key} out",
    ),
    Rule(
        keys=(switches.SHARE,),
        clashes=lambda at: switches.compile_key(at) == switches.SHARE and switches.compile_obstacle(at),
        what="only compiled blocks have one: {clash}",
    ),
    Rule(
        keys=(_COMPUTE,),
        clashes=candidates.no_asked_product,
        remedy="leave {key} out; features.weights: fp8 saves memory anyway",
    ),
    Rule(
        keys=(_WEIGHTS,),
        clashes=lambda at: at.asked(_WEIGHTS) not in ("auto", at.geometry.stored_as) and _stored(at),
        what="{clash}, so they cannot be had in {asked}",
        remedy=f"leave {{key}} out, {_FULL_FILES}",
    ),
    Rule(
        keys=(_COMPUTE,),
        clashes=lambda at: at.asked(_COMPUTE) == "fp8" and _stored(at),
        what="{clash}, so they cannot be had in {asked}",
        remedy=f"leave {{key}} out, {_FULL_FILES}",
    ),
    Rule(
        keys=("method",),
        clashes=lambda at: at.config.method == "full" and _stored(at),
        what="{clash}, which cannot be trained",
        remedy=f"use method: lora, {_FULL_FILES}",
    ),
    Rule(
        keys=("lora.type",),
        clashes=lambda at: at.geometry.stored_as and needs_whole_base(at.config) and _base_config(at),
        what="{asked} wants a base that is not quantised; {clash} says {at.geometry.stored_as}",
        remedy=f"write lora, {_FULL_FILES}",
    ),
    Rule(
        keys=(_WEIGHTS,),
        clashes=_missing,
        remedy=lambda at: _installed(at, candidates.asked_way(at).name, _WEIGHTS),
    ),
    *(
        Rule(
            keys=(key,),
            clashes=lambda at, key=key: switches.compile_key(at) == key and _uncompiled(at),
            what="blocks with {clash}",
        )
        for key in (switches.COMPILE, switches.SHARE)
    ),
    Rule(
        keys=(_MODULATION,),
        clashes=_no_modulation,
        remedy=lambda at: _installed(at, at.asked(_MODULATION), _MODULATION),
    ),
    Rule(
        keys=(optimizers.TRACKER,),
        clashes=lambda at: at.asked(optimizers.TRACKER) == "wandb" and at.lacks("wandb"),
        what="{asked} is not installed",
        remedy=f"{extras.remedy('wandb')}; or leave {{key}} out",
    ),
)


def judge(family: Family, loaded: Loaded) -> None:
    """Raise one ConfigError with everything in which a configuration contradicts itself or its family."""
    config, environ = loaded.config, environment.snapshot()
    context = Context(config=config, sources=loaded.sources, environ=environ, lora_presets={})
    problems = check(context, frozenset())
    for rule in FAMILY:
        for key in _numbered(rule.keys, len(config.data.sets)):
            at = Written(family, key, value_of(config, key))
            clash = rule.clashes(at)
            if clash:
                what, remedy = _texts(rule, at, key=key, asked=at.value, clash=clash)
                where = loaded.sources.get(key, key)
                problems.append(Problem(what=f"`{key}`: {what}", where=where, remedy=remedy))
    if problems:
        raise ConfigError(problems)


def require(situation: Situation) -> None:
    """Raise HardwareError for the first value that was written and that the machine does not take."""
    for rule in MACHINE:
        key, clash = rule.keys[0], rule.clashes(situation)
        if clash:
            what, remedy = _texts(rule, situation, key=key, asked=situation.asked(key), clash=clash)
            raise situation.refuse(key, what, remedy)


def _numbered(keys: Sequence[str], sets: int) -> list[str]:
    """The keys with a number for each `*`: those of a set after those of another."""
    each = [key.replace("*", str(number)) for number in range(sets) for key in keys if "*" in key]
    return [*each, *(key for key in keys if "*" not in key)]


def _texts(rule: Rule[Case], at: Case, **words: object) -> tuple[str, str]:
    """What is wrong, and what to do."""
    remedy = rule.remedy if isinstance(rule.remedy, str) else rule.remedy(at)
    return rule.what.format(at=at, **words), remedy.format(at=at, **words)
