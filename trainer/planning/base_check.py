"""Checks by configs alone that a folder holds a base model of the run's family. Imports no torch.

Quick enough for every plan; `base_load_check` builds, opens and reads what only the libraries can judge.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer import families
from trainer.config.reading.load import Loaded
from trainer.config.schema import RunConfig
from trainer.errors import AccessError, ConfigError, Problem
from trainer.families.family import Family
from trainer.files.weight_files import weight_files
from trainer.modeling.base.base import base_at, read_config, require_readable
from trainer.modeling.base.hub import refusal_told
from trainer.planning.plan import Decision
from trainer.planning.rules import beyond_positions, require_inputs, require_length
from trainer.planning.shapes.geometry import table_component
from trainer.planning.shapes.run_shapes import CONFIGS, roles
from trainer.words.sizes import GB

# bytes of a value in the files of a base that is not here: the hub's bases are in bf16
_STORED_BYTES = 2
INDEX = "model_index.json"
_SCHEDULER, _GENERATION = "scheduler_config.json", "generation_config.json"
_REMEDY = "copy the component again; of a download delete what its files link to, run `trainer fetch CONFIG`"
# what scales latents: a class fills in another model's value where one of them is left out
_SCALES = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
_ROPES = ("rope_scaling", "rope_parameters")  # the first that is not empty counts
_HEADS = ("num_attention_heads", "num_heads")
_FACTORS = ("scaling_factor", "latents_std")
# values that previews take from there, as examples of their kinds
_ANSWERS = dict.fromkeys(("do_sample", "use_cache", "output_hidden_states", "output_attentions"), False) | {
    key: 1.0
    for key in ("temperature", "top_k", "top_p", "repetition_penalty", "max_length", "max_new_tokens")
}
# counts of what is built one by one, and the most that any model has by far
_BUILT = re.compile(r"(layers|blocks|depth)$|^layers_per_block$")
_MOST_BUILT = 10_000
_SIZES = re.compile(r"(size|dim|heads|channels)$")
_EPSILON = re.compile(r"(^|_)(eps|epsilon)$")
# numbers that published bases leave out, or say as null
_OPTIONAL = {"head_dim": 64, "sliding_window": 4096}
# null where nothing is stretched, as a class of diffusers has it that is told nothing
_NONE_BY_DEFAULT = frozenset({"shift_terminal"})
# where the name of a model ends in the name of one of transformers' classes
_PURPOSE = re.compile(r"For|Model|Text|Encoder")


def check_base(family: Family, loaded: Loaded, folder: Path) -> tuple[str, ...]:
    """Warnings about the base model in `folder`, as far as it is there.

    Raises ConfigError (78) where it is another family's, takes more than latents, or attends over fewer
    tokens than conversations may have, AccessError (77) where a component is of another class or its config
    is damaged, with every problem, and where this user may not enter one.
    """
    require_readable(folder, families.components(family))
    with refusal_told(folder):
        return _checked(family, loaded, folder)


def _checked(family: Family, loaded: Loaded, folder: Path) -> tuple[str, ...]:
    """Warnings of `check_base`, which raises the same."""
    said = _said(folder)
    warnings = tuple(_require_family(family, loaded, said))
    problems = [
        Problem(what=f"{name or 'the model'}: {what}", where=str(where), remedy=remedy)
        for name in families.components(family)
        for where, what, remedy in _problems(family, folder, name, said)
    ]
    if problems:
        raise AccessError(problems)
    require_length(family, loaded, folder)
    require_inputs(family, loaded, folder)
    return (*warnings, *beyond_positions(family, loaded, folder), *_without_dropout(family, folder))


def require_trained(family: Family, folder: Path, where: str) -> None:
    """Raise ConfigError where the component that is trained is another family's in this folder."""
    name = family.trained_component
    theirs = read_config(folder / name / "config.json")
    ours = read_config(CONFIGS / family.name / name / "config.json")
    problems = [
        Problem(what=what, where=where, remedy=f"give a configuration of its family, or a {family.title}")
        for what in _other_class(theirs, ours, named_class(family, name))
    ]
    if problems:
        raise ConfigError(problems)


def named_class(family: Family, component: str) -> str:
    """Class of a component in its library, as the family loads it."""
    ours = _said(CONFIGS / family.name)
    return str(ours[component][1] if component else ours["architectures"][0])


def _said(folder: Path) -> Mapping[str, Any]:
    """The folder's index of components, or the config of a language model; empty where neither is there."""
    found = (folder / name for name in (INDEX, "config.json"))
    return next((read_config(path) for path in found if path.is_file()), {})


# ---- the family


def _require_family(family: Family, loaded: Loaded, said: Mapping[str, Any]) -> Iterator[str]:
    """Raise ConfigError where the base says that it is another family's; warn where it can be of both."""
    ours = _said(CONFIGS / family.name)
    if not said or _pipeline(said) == _pipeline(ours):
        return
    if "_class_name" not in said and said.get("architectures") is not None and not _architectures(said):
        return  # what it is cannot be read: told of the component
    names = families.names()
    right = next((name for name in names if _pipeline(_said(CONFIGS / name)) == _pipeline(said)), "")
    same_model = bool(_trained(said)) and _trained(said) == _trained(ours)
    lacking = [name for name in families.components(family) if name not in said] if same_model else []
    what = f"the base model is a {_pipeline(said)}"
    if right and (lacking or not same_model):
        raise ConfigError(
            f"`family` is {family.name}, and {what}",
            where=loaded.sources.get("family", "family"),
            remedy=f"write `family: {right}`, or name a base of {family.title}",
        )
    if not same_model and _trained(ours):
        model = f" around a {_trained(said)}" if _trained(said) else ""
        raise ConfigError(
            f"{what}{model}, and {family.title} is a {_pipeline(ours)} around a {_trained(ours)}",
            where=loaded.sources.get("model.pretrained_model_name_or_path", "family"),
            remedy=f"name a base of {family.title}; {', '.join(families.names())} are the families",
        )
    if right:
        yield f"{what}, for which `family: {right}` is; as {family.name} it trains what that family is for"


def _without_dropout(family: Family, folder: Path) -> Iterator[str]:
    """A warning where the base's config asks for attention dropout, which no base is trained with."""
    path = folder / family.trained_component / "config.json"
    rate = read_config(path).get("attention_dropout") if path.is_file() else None
    if rate:
        yield f"the base is trained without the attention_dropout of {rate} that {path} asks for"


def _pipeline(said: Mapping[str, Any]) -> str:
    """The name of the whole: the class of a pipeline, or of a language model."""
    return str(said.get("_class_name") or next(iter(_architectures(said)), "model without a name"))


def _trained(said: Mapping[str, Any]) -> str:
    """Class of the denoiser; of a language model its own."""
    entry = said.get("transformer")
    if isinstance(entry, list) and len(entry) == 2:
        return str(entry[1])
    return "" if "_class_name" in said else _pipeline(said)


# ---- its components


def _problems(
    family: Family, folder: Path, name: str, said: Mapping[str, Any]
) -> Iterator[tuple[Path, str, str]]:
    """Problems of one component: the file that shows one, what is wrong there, and what to do."""
    if not said:
        return
    has_weights = name in roles(family)
    other = f"put {family.title}'s own there, or name a base of {family.title}"
    if name:
        entry = said.get(name)
        if not (isinstance(entry, list) and len(entry) == 2 and all(isinstance(one, str) for one in entry)):
            yield folder / INDEX, f"the index names {entry!r} in place of a library and a class", _REMEDY
            return
        # a tokenizer is loaded by the family's own class, whichever was saved
        if (has_weights or name == "scheduler") and entry[1] != named_class(family, name):
            what = f"it is a {entry[1]}, and {family.title} has a {named_class(family, name)}"
            yield folder / INDEX, what, other
            return
    if name == "scheduler" and (path := folder / name / _SCHEDULER).is_file():
        for what in _bad_values(read_config(path), read_config(CONFIGS / family.name / name / _SCHEDULER)):
            yield path, what, _REMEDY
    path = folder / name / "config.json"
    if has_weights and path.is_file():
        theirs, ours = read_config(path), read_config(CONFIGS / family.name / name / "config.json")
        for what in _other_class(theirs, ours, named_class(family, name)):
            yield path, what, other
        scales = _bad_scales(theirs, ours) if roles(family)[name] == "vae" else ()
        for what in (*_bad_values(theirs, ours), *scales):
            yield path, what, _REMEDY
        for key in () if name == family.trained_component else _without_heads(theirs, ours):
            yield path, f"it does not say {key}", _REMEDY
        if name != family.trained_component and ours.get("eos_token_id") is not None:
            for what in _bad_ids(theirs, "eos_token_id", required="eos_token_id" in theirs):
                yield path, what, _REMEDY
        if theirs.get("return_dict") is False:
            yield path, "return_dict is False, and its outputs are read by their names", _REMEDY
    path = folder / name / _GENERATION
    if not name and path.is_file():
        for what in _bad_generation(read_config(path)):
            yield path, what, _REMEDY


def _other_class(theirs: Mapping[str, Any], ours: Mapping[str, Any], wanted: str) -> Iterator[str]:
    """Signs that the config belongs to another class."""
    if (saved := theirs.get("_class_name") or wanted) != wanted:
        yield f"its config is of a {saved}, and a {wanted} is needed"
    kind, our_kind = theirs.get("model_type"), ours.get("model_type")
    # a text model may have been saved as part of the whole: clip, clip_text_model
    if kind is not None and our_kind is not None and not str(our_kind).startswith(str(kind)):
        yield f"its config is of model_type {kind}, and {our_kind} is needed for {wanted}"
        return
    saved_as, stem = _architectures(theirs) or [wanted], _PURPOSE.split(wanted)[0]
    if not any(one.startswith(stem) for one in saved_as):
        yield f"its config is of {', '.join(saved_as)}, and a {wanted} is needed"


def _architectures(theirs: Mapping[str, Any]) -> list[str]:
    """Classes of transformers that the config names; none where it names them in no list."""
    named = theirs.get("architectures")
    return [str(one) for one in named] if isinstance(named, list) else []


def _bad_values(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    """Values that are none of their key, nested ones too."""
    named = theirs.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(one, str) for one in named)):
        yield f"architectures is {named!r}, and a list of names is needed"
    for key, our in {**_OPTIONAL, **{key: our for key, our in ours.items() if our is not None}}.items():
        # ids of tokens are lists in some files, and -1 in others
        value = theirs.get(key)
        if key.startswith("_") or key.endswith("_id") or (value is None and key in _NONE_BY_DEFAULT):
            continue
        if value is None:
            # diffusers writes every value; a null of transformers is refused by `[]` where it is a fault
            if key in theirs and ("_class_name" in ours or _EPSILON.search(key)):
                yield f"{key} is null, and {our!r:.80} in the family's own base"
        elif isinstance(our, dict) and isinstance(value, dict):
            yield from (f"{key}.{what}" for what in _bad_values(value, our))
        elif needed := _needed(key, value, our):
            yield f"{key} is {value!r:.80}, and {needed}"
    # a config without text_config has the language model's keys itself
    yield from _bad_positions(theirs, ours if theirs.get("text_config") else ours.get("text_config", ours))


def _without_heads(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    """Keys of numbers of heads that are left out, nested ones too: weights have the same shapes with any
    number, and classes have a default.
    """
    for key, our in ours.items():
        value = theirs.get(key)
        if isinstance(our, dict) and isinstance(value, dict):
            yield from (f"{key}.{one}" for one in _without_heads(value, our))
        elif key in _HEADS and our is not None and value is None:
            yield key


def _bad_positions(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    """Rotary embeddings that no head of attention can have, or another than the model was made with."""
    width, heads, head = map(theirs.get, ("hidden_size", "num_attention_heads", "attention_head_dim"))
    dims = theirs.get("axes_dims_rope", ours.get("axes_dims_rope"))  # left out: the class's own
    if isinstance(dims, list) and all(map(_is_number, dims)) and _is_number(head) and sum(dims) != head:
        said = f"is {dims!r:.80}" if "axes_dims_rope" in theirs else "is left out"
        yield f"axes_dims_rope {said}, which are {sum(dims)} and not attention_head_dim, {head}"
    ropes = {one: theirs[one] for one in _ROPES if isinstance(theirs.get(one), dict)}
    for name, rope in ropes.items():
        if name == "rope_parameters" and rope.get("rope_theta", theirs.get("rope_theta")) is None:
            yield "rope_parameters does not say rope_theta"
        theta, factor = rope.get("rope_theta", 1.0), rope.get("factor", 1.0)
        if not (_is_number(theta) and 0 < theta < math.inf):
            yield f"{name}.rope_theta is {theta!r:.80}, and a number above 0 is needed"
        if not (_is_number(factor) and factor > 0):
            yield f"{name}.factor is {factor!r:.80}, and a number above 0 is needed"
    name = next((one for one, rope in ropes.items() if rope), "rope_parameters")
    own = ours.get("rope_parameters", {}).get("mrope_section")  # left out: the class's own
    parts = ropes.get(name, {}).get("mrope_section", own)
    listed = parts if isinstance(parts, list) else []
    if not (own and heads and all(isinstance(one, int) for one in (*listed, width, heads))):
        return
    if 2 * sum(listed) != (head := theirs.get("head_dim") or width // heads):
        said = "is left out, so that it is" if parts is own else "is"
        yield f"{name}.mrope_section {said} {parts!r:.80}, and a head has {head} values"


def _needed(key: str, value: object, our: object) -> str:
    """The kind of value that a key has in place of this one, as the family's own base says; empty where it is
    of that kind.
    """
    if isinstance(our, dict) and not isinstance(value, dict):
        return "a mapping is needed"
    if isinstance(our, bool) and not isinstance(value, bool):
        return "true or false is needed"
    if isinstance(our, list):
        if not isinstance(value, list):
            return "a list is needed"
        if our and not value and key != "architectures":
            return "a list with values is needed"
        wrong = next(filter(None, (_needed("", one, our[0]) for one in value if our)), "")
        return f"of each of it: {wrong}" if wrong else ""
    if isinstance(our, str) and not isinstance(value, str):
        return "a text is needed"
    if not isinstance(our, int | float) or isinstance(our, bool):
        return ""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "a number is needed"
    if not math.isfinite(value):
        return "a finite number is needed"
    if key and value < 0 and our >= 0:
        return "cannot be negative"
    if value == 0 and our > 0 and _SIZES.search(key):
        return "a size cannot be 0"
    if _EPSILON.search(key) and value >= 1:
        return "a norm's epsilon is small"
    if value > _MOST_BUILT and _BUILT.search(key):
        return f"no model has more than {_MOST_BUILT:,} of them"
    return ""


def _bad_scales(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    """Scales of a VAE's latents that are missing, of other channels than its latents have, or not above 0."""
    for key in _SCALES:
        if ours.get(key) is None:
            continue
        value, channels = theirs.get(key), theirs.get("z_dim")
        if value is None:
            yield f"it does not say {key}, by which latents are scaled"
        elif isinstance(value, list) and len(value) != channels:
            yield f"{key} has {len(value)} values, and latents have {channels} channels (z_dim)"
        elif key in _FACTORS and any(
            _is_number(one) and one <= 0 for one in (value if isinstance(value, list) else [value])
        ):
            yield f"{key} is {value!r:.80}, and latents are scaled by numbers above 0"


def _bad_generation(said: Mapping[str, Any]) -> Iterator[str]:
    """Values of another kind in what says how a language model answers."""
    for key in ("eos_token_id", "bos_token_id", "pad_token_id"):
        yield from _bad_ids(said, key)
    for key, our in _ANSWERS.items():
        if said.get(key) is not None and (needed := _needed(key, said[key], our)):
            yield f"{key} is {said[key]!r:.80}, and {needed}"


def _bad_ids(said: Mapping[str, Any], key: str, *, required: bool = False) -> Iterator[str]:
    """A key that names no token, or is null where it is `required`."""
    value = said.get(key)
    ids = value if isinstance(value, list) else [value] if required or value is not None else []
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= -1 for one in ids):
        yield f"{key} is {value!r:.80}, and numbers of tokens are needed"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- what is here of it


def base_rows(family: Family, config: RunConfig, folder: Path | None) -> Iterator[Decision]:
    """One row on a repository: the commit that is here, or the files that are missing and their size."""
    components, trained = families.components(family), family.trained_component
    missing = base_at(folder, config, components, trained=trained).missing_line
    name = config.model.pretrained_model_name_or_path
    if missing:
        size = f"about {missing_bytes(family, folder) / GB:.1f} GB"
        size = "some configs" if config.model.weights == "random" else size
        yield Decision("download", size, "facts", f"{name}: {missing}")
        return
    assert folder is not None
    pin = "" if config.model.revision == folder.name else f"; `model.revision: {folder.name}` pins it"
    yield Decision("base", folder.name[:12], "facts", f"the commit of {name} that is here{pin}")


def missing_bytes(family: Family, folder: Path | None) -> int:
    """Bytes of the weight files that are not below `folder`, as their index or the committed table says."""
    total = 0
    for name, role in roles(family).items():
        whole, here = _STORED_BYTES * table_component(family.name, name, role).parameters, 0
        if folder is not None:
            found = weight_files(folder / name)
            if found.state == "complete":
                continue
            whole = whole if found.total_bytes is None else found.total_bytes
            here = sum(file.stat().st_size for file in found.files)
        total += max(0, whole - here)
    return total
