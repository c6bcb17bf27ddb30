"""Values that were written, and that the family or the machine does not take: one row each.

Rules that need the configuration alone are in `config.judging`. Planning runs them all, on what was written
and on whatever is suggested instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.config import environment
from trainer.config.judging import rules as of_configuration
from trainer.config.judging.rule import Clash, Context, Rule, check
from trainer.config.reading.load import Loaded
from trainer.config.schema import DataSet
from trainer.config.tree import by_user
from trainer.data.pictures.buckets import buckets
from trainer.errors import ConfigError, HardwareError
from trainer.families import names
from trainer.families.family import Family
from trainer.families.language import positions_of
from trainer.modeling.base.base import read_config
from trainer.planning.choose import attention, candidates, loading, optimizers, swap_and_shard, switches
from trainer.planning.choose.situation import Situation
from trainer.planning.shapes.adapters import needs_whole_base
from trainer.planning.shapes.run_shapes import CONFIGS
from trainer.telemetry.run_folder.plan import PLAN_FILE
from trainer.ways.storages import WAYS, multiplied_in
from trainer.words import extras

# switches of diffusers' classes by which a model takes another picture beside the latents
_MORE_INPUTS = ("visual_cond", "use_additional_t_cond", "use_layer3d_rope")


@dataclass(frozen=True, kw_only=True)
class OfFamily(Context):
    """A configuration, and the family that is to take it."""

    family: Family


_ABOUT_IMAGES = {
    "mask_dir": "a language model learns from the assistant's words, and takes no mask besides",
    "loss_weight": "the loss is a mean over tokens: write `repeats` to weigh a set",
    "is_reg": "there is no trigger word to keep away",
    "flip": "a conversation cannot be mirrored",
    "random_crop": "a conversation has nothing to crop",
}
"""Keys of a set that are about images -> why a conversation has none of it."""


def _written(at: OfFamily, refused: bool, in_sets: Mapping[str, str], *others: str) -> Iterator[Clash]:
    """Keys of sets, with a reason each, and other keys that have a value, where that is `refused`."""
    sets, standard = at.config.data.sets if refused else (), vars(DataSet())
    for number, one in enumerate(sets):
        for name, reason in in_sets.items():
            if vars(one)[name] != standard[name]:
                yield _place(at, f"data.sets.{number}.{name}", reason)
    for key in others if refused else ():
        section, _, name = key.partition(".")
        if vars(vars(at.config)[section])[name]:
            yield _place(at, key)


def _place(at: OfFamily, key: str, reason: str = "") -> Clash:
    where, most = at.sources.get(key, key), str(at.family.max_sequence_length)
    return {"key": key, "where": where, "why": reason, "title": at.family.title, "most": most}


def _too_wide(at: OfFamily) -> Iterator[Clash]:
    """Resolutions whose pictures would be longer than the model's positions."""
    most, data, preview = at.family.most_side, at.config.data.resolution, at.config.validation.resolution
    longest = 0 if most is None or _talks(at) else max(map(max, buckets(data, at.family.pixel_multiple)))
    if most is not None and longest > most:
        yield _place(at, "data.resolution", f"{most} pixels; those of {data} have up to {longest}")
    if most is not None and preview is not None and preview > most:
        yield _place(at, "validation.resolution", f"{most} pixels")


def _talks(at: OfFamily) -> bool:
    return at.family.sample_kind == "conversation"


FAMILY: tuple[Rule[OfFamily], ...] = (
    Rule(("data.sets", "validation.chat_file"),
         lambda at: _written(at, not _talks(at), {"chat_file": "", "dataset_info": ""},
                             "validation.chat_file", "validation.dataset_info"),
         "`{key}`: {title} trains on images", "write `img_dir: DIR`, or use another family"),
    Rule(("data.sets", "validation.img_dir"),
         lambda at: _written(at, _talks(at), {"img_dir": ""}, "validation.img_dir"),
         "`{key}`: {title} trains on conversations",
         "write `chat_file: FILE`, or --dataset FILE, of .jsonl, .json or .parquet; or use another family"),
    Rule(("data.sets", "validation.control_dir", "validation.control_images"),
         lambda at: _written(at, not at.family.control_counts[1], {"control_dir": ""},
                             "validation.control_dir", "validation.control_images"),
         "`{key}`: {title} takes no control images", "leave it out"),
    Rule(("data.max_sequence_length",),
         lambda at: _written(at, at.config.data.max_sequence_length > at.family.max_sequence_length, {},
                             "data.max_sequence_length"),
         "`{key}`: {title} takes {most} tokens at most", "write {most} or less"),
    Rule(("data.caption_dropout_rate",), lambda at: _written(at, _talks(at), {}, "data.caption_dropout_rate"),
         "`{key}`: a conversation has no caption to leave out", "write 0"),
    Rule(("data.trigger_word",), lambda at: _written(at, _talks(at), {}, "data.trigger_word"),
         "`{key}`: a conversation has no caption to put a word before", "leave it out"),
    Rule(("data.on_long",),
         lambda at: _written(at, not _talks(at) and at.config.data.on_long != "error", {}, "data.on_long"),
         "`{key}`: {title} has captions, which its text encoder cuts", "leave it out"),
    Rule(("data.learn",),
         lambda at: _written(at, not _talks(at) and at.config.data.learn != "answers", {}, "data.learn"),
         "`{key}`: {title} trains on images, and captions are not learned", "leave it out"),
    Rule(("data.chat_template",),
         lambda at: _written(at, not _talks(at) and at.config.data.chat_template != "auto", {},
                             "data.chat_template"),
         "`{key}`: {title} trains on images, and a caption is no conversation", "leave it out"),
    Rule(("data.sets",), lambda at: _written(at, _talks(at), _ABOUT_IMAGES),
         "`{key}`: {title} trains on conversations, and {why}", "leave it out"),
    Rule(("data.resolution", "validation.resolution"), _too_wide,
         "`{key}`: a side of {title}'s pictures has at most {why}", "write a smaller one"),
    Rule(("validation.metrics",),
         lambda at: _written(at, _talks(at) and bool(at.config.validation.metrics), {}, "validation.metrics"),
         "`{key}`: {title} writes text, and these measure pictures", "leave it out"),
)  # fmt: skip


def judge(family: Family, loaded: Loaded) -> None:
    """Raise one ConfigError with everything in which a configuration contradicts itself or its family."""
    at = OfFamily(config=loaded.config, sources=loaded.sources, environ=environment.snapshot(), family=family)
    problems = [*check(of_configuration.RULES, at), *check(FAMILY, at)]
    if problems:
        raise ConfigError(problems)


def without_effect(family: Family, loaded: Loaded, folder: Path) -> Iterator[str]:
    """A warning for each key that was written and says nothing to a family of this kind or to its base in
    `folder`, but for those that `judge` refuses. A preset is for families of both kinds.
    """
    talks = family.sample_kind == "conversation"
    kind = "conversations" if talks else "images"
    reasons = dict.fromkeys(
        sorted(of_configuration.OF_IMAGES if talks else of_configuration.OF_CONVERSATIONS),
        f"{family.title} trains on {kind}",
    )
    if not talks and not _distilled(family, folder):
        reasons["flow.guidance_scale"] = "this base is not told a guidance while it trains"
    for key, reason in reasons.items():
        section, _, name = key.partition(".")
        ours = vars(loaded.config)[section]
        standard = type(ours).model_fields[name].default
        usual = (standard, family.defaults.get(section, {}).get(name, standard))
        where = loaded.sources.get(key, "default")
        if by_user(where) and vars(ours)[name] not in usual:
            yield f"`{key}` ({where}) has no effect: {reason}"


def _distilled(family: Family, folder: Path) -> bool:
    """Whether the base in `folder` is told a guidance value; as the published one, where it does not say."""
    found = (root / family.trained_component / "config.json" for root in (folder, CONFIGS / family.name))
    said = (read_config(path) for path in found if path.is_file())
    return bool(next((one[_GUIDANCE] for one in said if _GUIDANCE in one), False))


def require_shift(family: Family, loaded: Loaded, folder: Path) -> None:
    """Raise ConfigError where `flow.shift` asks for a shift by resolution and the base has none."""
    path = folder / "scheduler" / "scheduler_config.json"
    asked = loaded.config.flow.shift == "resolution" and family.sample_kind == "image"
    if asked and path.is_file() and not read_config(path).get("use_dynamic_shifting"):
        raise ConfigError(
            f"`{_SHIFT}: resolution`: the base model's scheduler has no shift that depends on the resolution"
            f" ({path} has no `use_dynamic_shifting: true`)",
            where=loaded.sources.get(_SHIFT, _SHIFT),
            remedy=f"write `{_SHIFT}: auto`, or a number",
        )


def require_length(family: Family, loaded: Loaded, folder: Path) -> None:
    """Raise ConfigError where the base's attention has a window that a conversation may be longer than."""
    path, key = folder / family.trained_component / "config.json", "data.max_sequence_length"
    said, asked = read_config(path) if path.is_file() else {}, loaded.config.data.max_sequence_length
    window = family.window(said)
    if window is not None and window < asked:
        raise ConfigError(
            f"`{key}` is {asked}, and a token of this base attends to the "
            f"last {window} only ({path} says so): rows are computed without such a window",
            where=loaded.sources.get(key, key),
            remedy=f"write {key}: {window} or less, or name a base without a sliding window",
        )


def beyond_positions(family: Family, loaded: Loaded, folder: Path) -> Iterator[str]:
    """A warning where a conversation may be longer than the positions that a language model was trained with:
    those of a row begin anew with each conversation.
    """
    path = folder / family.trained_component / "config.json"
    if family.sample_kind != "conversation" or not path.is_file():
        return
    positions, asked = positions_of(read_config(path)), loaded.config.data.max_sequence_length
    if positions is not None and positions < asked:
        yield (
            f"data.max_sequence_length is {asked}: conversations of more than {positions} tokens reach"
            f" positions that this base was not trained with ({path})"
        )


def require_inputs(family: Family, loaded: Loaded, folder: Path) -> None:
    """Raise ConfigError where the base is given more than noised latents: relatives of a family, for filling
    in or by edges and depth, have its class and no pipeline that is trained here.
    """
    path = folder / family.trained_component / "config.json"
    ours = CONFIGS / family.name / family.trained_component / "config.json"
    if family.sample_kind != "image" or not path.is_file():
        return
    said, known = read_config(path), read_config(ours)
    outputs, patch = said.get("out_channels"), said.get("patch_size", 1)
    given = said.get("in_channels")
    wider = all(isinstance(one, int) for one in (given, outputs, patch)) and given != outputs * patch**2
    problems = [f"in_channels {given} for {outputs} that it gives"] if wider else []
    problems += [f"{key}: true" for key in _MORE_INPUTS if said.get(key) and not known.get(key)]
    if problems:
        raise ConfigError(
            f"the base model takes more than the noised picture ({', '.join(problems)} in {path}), which"
            f" {family.title} does not",
            where=loaded.sources.get("model.pretrained_model_name_or_path", "family"),
            remedy=f"name a base of {family.title} itself; {', '.join(names())} are the families",
        )


Why = Callable[[Situation], str | bool]
"""Why a value that was written cannot be had; empty or False where it can."""
_WEIGHTS, _COMPUTE, _MODULATION = "features.weights", "features.compute", "features.modulation"
_BLOCKS, _TF32, _ADAPTER = "features.activation_checkpointing", "features.tf32", "lora.type"
_OPTIMIZER, _COMPILE, _SHARE = optimizers.KEY, switches.COMPILE, switches.SHARE
_SHIFT, _GUIDANCE = "flow.shift", "guidance_embeds"
_FULL_FILES = "or use the model's full-precision files"


def _refused(key: str, why: Why, remedy: str | Callable[[Situation], str] = "") -> Rule[Situation]:
    """The value of `key` cannot be had for this reason."""

    def clashes(at: Situation) -> Iterator[Clash]:
        found = why(at)
        if found:
            advice = remedy if isinstance(remedy, str) else remedy(at)
            if at.goes_on and Path(at.source(key)).name == PLAN_FILE:  # nobody wrote it
                advice = (
                    "the run began with it: go on on such a machine, or start afresh in another output_dir"
                )
            yield {"key": key, "why": str(found), "remedy": advice or f"leave {key} out"}

    return Rule((key,), clashes, "{key}: {why}", "{remedy}")


def _too_many_blocks(at: Situation) -> str:
    asked, blocks = at.config.features.activation_checkpointing, at.geometry.blocks
    too_many = asked != "auto" and not isinstance(asked, bool) and asked > blocks
    return f"{asked} blocks are to be recomputed, the model has {blocks}" if too_many else ""


def _stored_in(at: Situation) -> tuple[str, str]:
    """The file by which a checkpoint is quantised already, and what it says; empty for others."""
    way = at.geometry.stored_as
    component = next(part.name for part in at.geometry.components if part.role == "trained")
    folder = at.config.model.pretrained_model_name_or_path
    file = "/".join(filter(None, (folder, component, "config.json")))
    return (file, f"{file} says that the weights are stored in {way}") if way else ("", "")


def _not_in(at: Situation, asked: str) -> str:
    """Why weights of a checkpoint that is quantised already cannot be had in `asked`."""
    file, says = _stored_in(at)
    return f"{says}, so they cannot be had in {asked}" if file else ""


def _no_product(at: Situation) -> str:
    way = multiplied_in(at.config.features.compute)
    return candidates.no_product(at, way) if way else ""


def _not_multiplied(at: Situation) -> str:
    way = multiplied_in(at.config.features.compute)
    return _not_in(at, way.weights) if way else ""


def _no_storage(at: Situation) -> str:
    what = candidates.not_stored(at, replace(candidates.asked_way(at), modulation=""))
    return ": ".join(filter(None, (_stored_in(at)[0], what))) if what else ""


def _no_modulation(at: Situation) -> str | bool:
    way, beside = candidates.asked_way(at), at.config.features.modulation
    apart = beside in WAYS and not way.trains and not way.packs
    return apart and candidates.not_stored(at, replace(way, modulation=beside))


def _uncompiled(at: Situation) -> Iterator[Clash]:
    key, way = switches.compile_key(at), candidates.asked_way(at)
    if key and candidates.uncompiled(at, way):
        why = f"blocks with {way.weights} weights cannot be compiled: {candidates.no_product(at, way)}"
        yield {"key": key, "why": why, "remedy": f"leave {key} out"}


def _no_package(at: Situation) -> str:
    asked = at.config.train.optimizer
    package = at.lacks(optimizers.PACKAGES.get(asked, ""))
    return f"{asked} needs {package}, which is not installed" if package else ""


def _loses_updates(at: Situation) -> str:
    asked = at.config.train.optimizer
    loses = asked in optimizers.PACKAGES and optimizers.trains_in_bf16(at)
    return f"{asked} would round its updates to bf16, which loses the small ones" if loses else ""


def _has_no_bf16(at: Situation) -> str:
    asked = at.config.train.optimizer
    alone = asked == optimizers.STOCHASTIC and not optimizers.trains_in_bf16(at)
    trained = "an adapter" if at.config.method == "lora" else f"weights in {at.dtype}"
    return f"{asked} is for full fine-tunes in bf16, and this run trains {trained}" if alone else ""


def _no_share(at: Situation) -> str:
    obstacle = switches.compile_key(at) == switches.SHARE and switches.compile_obstacle(at)
    return f"only compiled blocks have one: {obstacle}" if obstacle else ""


def _needs_whole(at: Situation) -> str:
    file, kind = _stored_in(at)[0], at.config.lora.type
    whole = f"{kind} wants a base that is not quantised; {file} says {at.geometry.stored_as}"
    return whole if file and needs_whole_base(at.config) else ""


def _installed(extra: str, key: str) -> str:
    return f"{extras.remedy(extra)}; or leave {key} out"


def _storage_remedy(at: Situation) -> str:
    way = candidates.asked_way(at)
    return extras.remedy(way.extra) if at.lacks(way.package) else f"leave {_WEIGHTS} out"


def _modulation_remedy(at: Situation) -> str:
    stored = WAYS[at.config.features.modulation]
    return extras.remedy(stored.extra) if at.geometry.modulation.parameters else f"leave {_MODULATION} out"


def _product_remedy(at: Situation) -> str:
    instead = "" if at.config.method == "full" else "; features.weights: fp8 saves memory anyway"
    written = at.type_row.source
    dtype = f", or {written}" if at.on_gpu and at.dtype != "bf16" and written != "auto" else ""
    return f"leave {_COMPUTE} out{dtype}{instead}"


MACHINE: tuple[Rule[Situation], ...] = (
    _refused(swap_and_shard.SWAP, swap_and_shard.swap_refused),
    _refused(swap_and_shard.SHARD, swap_and_shard.shard_refused),
    _refused(_BLOCKS, _too_many_blocks, lambda at: f"write {at.geometry.blocks} at most, or true for all"),
    _refused(_TF32, lambda at: at.config.features.tf32 is True and switches.no_tf32(at)),
    _refused(_OPTIMIZER, _no_package,
             lambda at: _installed(at.config.train.optimizer.replace("_", "-"), _OPTIMIZER)),
    _refused(_OPTIMIZER, _has_no_bf16, f"leave {_OPTIMIZER} out"),
    _refused(_OPTIMIZER, _loses_updates,
             f"leave {_OPTIMIZER} out: AdamW keeps what bf16 loses, in less memory than fp32 copies"),
    _refused(attention.KEY, attention.cannot_run),
    _refused(attention.KEY, attention.not_installed, attention.installed_by),
    _refused(loading.KEY,
             lambda at: at.config.features.loader == loading.PACKAGE and loading.not_here(at)),
    _refused(_COMPILE, lambda at: at.config.features.compile is True and switches.compile_obstacle(at),
             f"install it, or leave {_COMPILE} out"),
    _refused(_SHARE, _no_share),
    _refused(_COMPUTE, _no_product, _product_remedy),
    _refused(_WEIGHTS,
             lambda at: at.config.features.weights not in ("auto", at.geometry.stored_as)
             and _not_in(at, at.config.features.weights),
             f"leave {_WEIGHTS} out, {_FULL_FILES}"),
    _refused(_COMPUTE, _not_multiplied, f"leave {_COMPUTE} out, {_FULL_FILES}"),
    _refused("method",
             lambda at: at.config.method == "full" and _stored_in(at)[1]
             and f"{_stored_in(at)[1]}, which cannot be trained",
             "use method: lora, or the model's full-precision files"),
    _refused(_ADAPTER, _needs_whole, f"write lora, {_FULL_FILES}"),
    _refused(_WEIGHTS, _no_storage, _storage_remedy),
    Rule((_COMPILE, _SHARE), _uncompiled, "{key}: {why}", "{remedy}"),
    _refused(_MODULATION, _no_modulation, _modulation_remedy),
    _refused(optimizers.TRACKER,
             lambda at: at.config.train.report_to == "wandb" and at.lacks("wandb")
             and "wandb is not installed",
             _installed("wandb", optimizers.TRACKER)),
)  # fmt: skip


def require(situation: Situation) -> None:
    """Raise HardwareError for the first value that was written and that the machine does not take."""
    problems = check(MACHINE, situation)
    if problems:
        raise HardwareError(problems[:1])
