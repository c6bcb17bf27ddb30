"""Forms from the JSON schema of a configuration: fields, and what was typed in them as a layer.

A field that is left empty writes nothing: what lies below it, preset, file, family or default, decides. So a
form of every key is a layer of those that somebody typed, and nothing has to be compared with what was shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from trainer.config import fields
from trainer.config.reading import strict_yaml
from trainer.config.reading.layers import Layer, emptied
from trainer.config.reading.paths import begun_at
from trainer.config.schema import RunConfig
from trainer.config.tree import KeyPath, Node, at, merge
from trainer.errors import Problem

Kind = Literal["choice", "number", "text", "path", "lines", "marks"]
"""Inputs: one of some words, a number, a line, a folder or file, a line an item, several of some words."""
SETS = "data.sets"
"""The key of the list of data sets, whose items are objects."""
SOURCE = "--set "
"""Beginning of the source of what was typed in a field; its key follows."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEEDED = _words(
    "model.pretrained_model_name_or_path data.trigger_word train.max_train_steps output_dir"
    " data.sets.img_dir data.sets.chat_file"
)
USUAL = _words(
    "family method data.resolution data.caption_dropout_rate data.max_sequence_length data.sets.control_dir"
    " data.sets.repeats data.sets.flip lora.rank lora.alpha lora.target_modules train.num_train_epochs"
    " train.train_batch_size train.gradient_accumulation_steps train.learning_rate train.optimizer"
    " train.lr_scheduler train.lr_warmup_steps train.seed features.memory_budget features.weights"
    " features.compute parallel.gpus validation.prompts validation.every_steps validation.held_out"
    " checkpoint.checkpointing_steps checkpoint.checkpoints_total_limit"
)
"""Keys that a form shows first, and those that it shows next; positions in lists left out."""
_ONE_OF = ("img_dir", "chat_file", "dataset_info")
"""Keys of a data set of which it has one."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """One key with its input."""

    key: str
    """Dotted; with its position, from 0, inside a list of objects."""
    help: str
    takes: str
    """The values that it takes, in words."""
    kind: Kind
    words: tuple[str, ...] = ()
    """Fixed values; beside them a `text` or a `path` takes others too."""
    minimum: float | None = None
    maximum: float | None = None
    whole: bool = False
    """Whether a number is a whole one."""
    structured: bool = False
    """Whether lists or mappings, as YAML in brackets, are values too; of `lines`, each."""

    @property
    def label(self) -> str:
        """Name of the key, without its section."""
        return self.key.removeprefix(f"{SETS}.").partition(".")[2] or self.key

    @property
    def group(self) -> str:
        """Key of the item of a list that the field belongs to; empty for fields outside of lists."""
        return ".".join(self.key.split(".")[:3]) if self.key.startswith(f"{SETS}.") else ""

    @property
    def depth(self) -> str:
        """`needed`, `usual` or `all`: how much a form shows before it shows this field."""
        plain = without_positions(self.key)
        return "needed" if plain in NEEDED else "usual" if plain in USUAL else "all"


@dataclass(frozen=True, kw_only=True)
class Section:
    """The fields of one section of the configuration."""

    name: str
    """Empty for the keys that lie in no section."""
    help: str
    fields: tuple[Field, ...]


def without_positions(key: str) -> str:
    """A dotted key without its positions in lists."""
    return ".".join(part for part in key.split(".") if not part.isdecimal())


def sections(schema: Mapping[str, Any], sets: int) -> tuple[Section, ...]:
    """The form of a JSON schema, with so many data sets; every key of it has one field."""
    found, loose = list[Section](), list[Field]()
    for name, node in schema["properties"].items():
        inner = definition_of(schema, node)
        if inner is None:
            loose += _fields(schema, name, node, sets)
            continue
        below = (_fields(schema, f"{name}.{key}", one, sets) for key, one in inner["properties"].items())
        every = tuple(field for some in below for field in some)
        found.append(Section(name=name, help=node["description"], fields=every))
    return (Section(name="", help="", fields=tuple(loose)), *found)


def options_of(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives of a schema's node, without null."""
    return [one for one in node.get("anyOf", (node,)) if one.get("type") != "null"]


def definition_of(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The section that a node, or its one alternative, refers to; None where it is a value."""
    for option in options_of(node):
        if "$ref" in option:
            one: Mapping[str, Any] = schema["definitions"][option["$ref"].rpartition("/")[2]]
            return one
    return None


def _fields(schema: Mapping[str, Any], key: str, node: Mapping[str, Any], sets: int) -> Iterator[Field]:
    """The field of a key; those of every key below it for a section, or a list of objects."""
    options, inner, places = options_of(node), definition_of(schema, node), [key]
    if "items" in options[0] and (items := definition_of(schema, options[0]["items"])) is not None:
        inner, places = items, [f"{key}.{number}" for number in range(sets)]
    if inner is None:
        yield _field(key, node["description"], options)
        return
    for place in places:
        for name, one in inner["properties"].items():
            yield from _fields(schema, f"{place}.{name}", one, sets)


def _field(key: str, text: str, options: Sequence[Mapping[str, Any]]) -> Field:
    """The field of a value with these alternatives."""
    words, kinds = list[str](), list[str]()
    field = Field(key=key, help=text, takes=fields.expected(tuple(key.split("."))), kind="text")
    for option in options:
        if "enum" in option or "const" in option:
            words += option.get("enum", (option.get("const"),))
        elif option.get("type") == "boolean":
            words += ("true", "false")
        elif option.get("type") in ("integer", "number"):
            kinds.append("number")
            low = option.get("minimum", option.get("exclusiveMinimum"))
            high = option.get("maximum", option.get("exclusiveMaximum"))
            field = replace(field, minimum=low, maximum=high, whole=option["type"] == "integer")
        elif option.get("type") == "array":
            several = option["items"].get("enum")
            kinds.append("marks" if several else "lines")
            words += several or ()
            field = replace(field, structured="anyOf" in option["items"] or len(options) > 1)
        elif option.get("type") == "object":
            kinds.append("text")
            field = replace(field, structured=True)
        else:
            kinds.append("path" if option.get("format") == "path" else "text")
    return replace(field, words=tuple(words), kind=_kind(kinds, words))


def _kind(kinds: Sequence[str], words: Sequence[str]) -> Kind:
    """The input for alternatives of these kinds, and fixed words."""
    if not kinds:
        return "choice"
    if kinds == ["marks"] or kinds == ["lines"] or (kinds == ["number"] and not words):
        return cast(Kind, kinds[0])
    return "path" if "path" in kinds else "text"


def layer(
    form: Sequence[Section],
    typed: Mapping[str, str],
    below: Node | None,
    root_of: Callable[[str], Path] | None = None,
) -> Layer:
    """The layer of what was typed, by key; blanks write nothing. `root_of` a key is where its relative paths
    begin.

    `below` is the list of data sets in the layers below: one of which something is typed is written again,
    whole, because lists do not merge. Keys that the form does not have are no problem here: they are not
    read.
    """
    tree, problems = Node(value={}, source="the form"), list[Problem]()
    sets: dict[int, Node] = {}
    for field in (field for section in form for field in section.fields):
        text = typed.get(field.key, "")
        if not text.strip():
            continue
        path, (node, wrong) = tuple(field.key.split(".")), _leaf(field, text)
        problems += wrong
        if node is None:
            continue
        node = node if root_of is None else begun_at(node, root_of(field.key), path)
        if not field.key.startswith(f"{SETS}."):
            tree = merge(tree, at(path, node))
            continue
        number, inner = int(path[2]), path[3:]
        written = sets.get(number, Node(value={}, source=f"{SOURCE}{SETS}"))
        sets[number] = merge(written, at(inner, node))
    if sets:
        tree = merge(tree, at(("data", "sets"), _sets(sets, below)))
    return tree, problems


def _sets(written: Mapping[int, Node], below: Node | None) -> Node:
    """The list of data sets: those below, each with what was typed of it, and new ones."""
    items = list(below.value) if below is not None and isinstance(below.value, list) else []
    for number, node in sorted(written.items()):
        if number >= len(items):
            items.append(node)
            continue
        lower, new = items[number].value, node.value
        assert isinstance(lower, dict) and isinstance(new, dict)
        rivals = _ONE_OF if any(name in new for name in _ONE_OF) else ()
        kept = {name: one for name, one in lower.items() if name not in rivals}
        items[number] = merge(replace(items[number], value=kept), node)
    return Node(value=items, source=f"{SOURCE}{SETS}")


def _leaf(field: Field, text: str) -> tuple[Node | None, list[Problem]]:
    """The value that was typed in a field; its source is SOURCE and the key."""
    source, path = f"{SOURCE}{field.key}", tuple(field.key.split("."))
    if field.kind in ("lines", "marks"):
        nodes, problems = list[Node](), list[Problem]()
        for line in filter(str.strip, text.splitlines()):
            one, wrong = _value(line.strip(), path, source, structured=field.structured)
            nodes += [one] if one is not None else []
            problems += wrong
        return Node(value=nodes, source=source), problems
    return _value(text.strip(), path, source, structured=field.structured)


def _value(text: str, path: KeyPath, source: str, *, structured: bool) -> tuple[Node | None, list[Problem]]:
    """One value, which is YAML where it is `structured` and begins with a bracket."""
    if structured and text.startswith(("[", "{")):
        node, problems = strict_yaml.parse(text, lambda line: source)
        return None if node is None else emptied(node, path), problems
    return Node(value=None if text in ("~", "null") else text, source=source), []


def origin(source: str) -> str:
    """The place where a value comes from, in a word or two: you, file, preset, family, default."""
    if source.startswith(SOURCE):
        return "you"
    return source if source == "default" or source.startswith(("family ", "preset ")) else "file"


def key_of(problem: Problem, keys: Sequence[str], sources: Mapping[str, str]) -> str:
    """The key that a problem is about; empty where none of `keys` is.

    It is the one that its place names, or that its text names first, or the one written at its place.
    """
    named_by = problem.where.removeprefix(SOURCE)
    if named_by in keys:
        return named_by
    quoted = [text.partition(":")[0] for text in problem.what.split("`")[1::2]]
    named = [text for text in quoted if text in keys]
    written = [key for key in keys if problem.where and sources.get(key) == problem.where]
    # a layer's name below `lora.rank_pattern`
    above = [key for text in quoted for key in keys if text.startswith(f"{key}.")]
    return next(iter((*named, *written, *above)), "")


def value_at(config: RunConfig, key: str) -> Any:
    """The value of a dotted key, with positions in lists; None where a section or an item is not there."""
    value: Any = config
    for part in key.split("."):
        if isinstance(value, tuple):
            value = value[int(part)] if int(part) < len(value) else None
        elif value is not None:
            value = vars(value)[part]
    return value


def value_text(value: Any) -> str:
    """A value as somebody would type it; empty for none."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(value_text, value))}]" if value else ""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {one}' for key, one in value.items())}}}" if value else ""
    return f"{value:g}" if isinstance(value, float) else str(value)
