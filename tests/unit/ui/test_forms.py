"""A form has every key of the schema, and what is typed in it is what the configuration then has."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from trainer import families
from trainer.config import fields
from trainer.config.reading import layers
from trainer.config.reading.load import from_layers
from trainer.config.schema import RunConfig
from trainer.config.tree import from_plain, leaves
from trainer.errors import ConfigError, Problem
from trainer.ui import forms

SCHEMA: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[3] / "train_configs/schema.json").read_text()
)
FORM = forms.sections(SCHEMA, 2)
FIELDS = {one.key: one for section in FORM for one in section.fields}
REQUIRED = {
    "family": "llama",
    "model": {"pretrained_model_name_or_path": "a/b"},
    "data": {"sets": [{"img_dir": "/d"}]},
    "output_dir": "/o",
}


TEXTS = frozenset(("type", "description", "default"))
KNOWN = tuple(
    TEXTS | frozenset(names)
    for names in (
        ("enum", "const", "pattern"),
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
        ("format",),
        ("items", "minItems"),
        ("patternProperties",),
    )
)
"""Keywords that may come together in one option of a key."""


def unknown_constructs(schema: dict[str, Any]) -> list[str]:
    """Keys of which the schema says something that no input is made for; they are shown as a line of text."""
    found = list[str]()
    for section in (schema, *schema["definitions"].values()):
        for name, node in section["properties"].items():
            for option in forms.options_of(node):
                if (
                    not any(option.keys() <= known for known in KNOWN)
                    and forms.definition_of(schema, option) is None
                ):
                    found.append(f"{name}: {option}")
    return found


def keys_of(section: type[BaseModel], before: str) -> Iterator[str]:
    """Every key below a section of the schema's classes; of lists of sections those of each of two items."""
    for name, field in section.model_fields.items():
        inner = fields.section_of(field.annotation)
        if inner is not None:
            yield from keys_of(inner, f"{before}{name}.")
        elif name == "sets":
            for number in (0, 1):
                item = fields.field_at(("data", "sets", "0"))
                assert item is not None
                one = fields.section_of(item.annotation)
                assert one is not None
                yield from keys_of(one, f"{before}{name}.{number}.")
        else:
            yield f"{before}{name}"


def loaded(*layers_over: Any) -> RunConfig:
    base = from_plain(REQUIRED, "base")
    return from_layers(
        [(base, [])], [], layers_over, name="base", family_defaults={"llama": {}}, environ={}
    ).config


def test_every_key_of_the_classes_has_one_field_with_help() -> None:
    assert sorted(FIELDS) == sorted(keys_of(RunConfig, ""))
    assert len(FIELDS) == sum(len(section.fields) for section in FORM)
    assert len(FIELDS) > 120
    for field in FIELDS.values():
        assert len(field.help) > 5 and field.label and field.takes


@pytest.mark.parametrize("names", [forms.NEEDED, forms.USUAL])
def test_depths_name_keys_that_there_are(names: frozenset[str]) -> None:
    assert names <= {forms.without_positions(key) for key in FIELDS}


def test_every_construct_of_the_schema_has_an_input() -> None:
    assert unknown_constructs(SCHEMA) == []


@pytest.mark.parametrize(
    "node",
    [
        {"type": "integer", "multipleOf": 8},
        {"type": "string", "contentEncoding": "base64"},
        {"anyOf": [{"type": "boolean"}, {"oneOf": [{"type": "string"}]}]},
        {"type": "array", "prefixItems": [{"type": "integer"}]},
    ],
)
def test_a_construct_without_an_input_is_found(node: dict[str, Any]) -> None:
    schema = copy.deepcopy(SCHEMA)
    schema["definitions"]["TrainSection"]["properties"]["novel"] = {**node, "description": "New."}
    (found,) = unknown_constructs(schema)
    assert found.startswith("novel: ")


@pytest.mark.parametrize(
    ("key", "kind", "words", "low", "high"),
    [
        ("family", "choice", len(families.names()), None, None),
        ("train.seed", "number", 0, 0, 2**32),
        ("lora.dropout", "number", 0, 0, 1),
        ("features.compile", "choice", 3, None, None),
        ("features.block_swap", "text", 1, 0, None),
        ("features.memory_budget", "text", 1, None, None),
        ("data.sets.1.img_dir", "path", 0, None, None),
        ("data.sets.0.control_dir", "path", 0, None, None),
        ("checkpoint.resume_from_checkpoint", "path", 2, None, None),
        ("validation.prompts", "lines", 0, None, None),
        ("validation.metrics", "marks", 6, None, None),
        ("lora.rank_pattern", "text", 0, None, None),
        ("validation.early_stop.patience", "number", 0, 1, None),
    ],
)
def test_inputs_are_of_the_right_type(
    key: str, kind: str, words: int, low: int | None, high: int | None
) -> None:
    field = FIELDS[key]
    assert (field.kind, len(field.words), field.minimum, field.maximum) == (kind, words, low, high)


TYPED: list[tuple[str, str, Any]] = [
    ("lora.rank", "8", 8),
    ("train.learning_rate", "2e-4", 2e-4),
    ("features.compile", "false", False),
    ("features.activation_checkpointing", "12", 12),
    ("features.memory_budget", "20GiB", "20GiB"),
    ("data.trigger_word", "  [sks]: person  ", "[sks]: person"),
    ("data.trigger_word", "null", None),
    ("validation.prompts", "a cat: red\r\n\r\n[x] - dog\n", ("a cat: red", "[x] - dog")),
    ("validation.metrics", "clip_t\ndinov2", ("clip_t", "dinov2")),
    (
        "validation.control_images",
        "/a.png\n[/b.png, /c.png]",
        (Path("/a.png"), (Path("/b.png"), Path("/c.png"))),
    ),
    ("lora.target_modules", "all-linear", "all-linear"),
    ("lora.target_modules", "[to_q, to_v]", ("to_q", "to_v")),
    ("lora.rank_pattern", "{to_q: 8, 'blocks.0.*': 4}", {"to_q": 8, "blocks.0.*": 4}),
    ("data.sets.0.control_dir", "[/x, /y]", (Path("/x"), Path("/y"))),
    ("data.sets.0.flip", "true", True),
    ("validation.columns.prompt", "q", "q"),
]


@pytest.mark.parametrize(("key", "text", "value"), TYPED)
def test_what_is_typed_is_the_value(key: str, text: str, value: Any) -> None:
    layer = forms.layer(FORM, {key: text}, from_plain(REQUIRED["data"], "base").get(("sets",)))
    assert layer[1] == []
    node = layer[0]
    assert node is not None
    validated = RunConfig.model_validate(merged(node.plain()))
    assert forms.value_at(validated, key) == value


def merged(typed: Any) -> Any:
    """The plain tree over the required values; lists are replaced."""
    tree = copy.deepcopy(REQUIRED)

    def lay(low: Any, high: Any) -> Any:
        if isinstance(low, dict) and isinstance(high, dict):
            return {**low, **{key: lay(low.get(key), one) for key, one in high.items()}}
        return high

    return lay(tree, typed)


@pytest.mark.parametrize("key", [key for key, one in FIELDS.items() if one.kind == "choice"])
def test_every_word_that_is_offered_is_taken(key: str) -> None:
    for word in FIELDS[key].words:
        node, _ = forms.layer(
            FORM, {key: word, "data.sets.0.img_dir": "/a", "data.sets.1.img_dir": "/b"}, None
        )
        assert node is not None
        found = forms.value_at(RunConfig.model_validate(merged(node.plain())), key)
        assert str(found).lower() == word


@pytest.mark.parametrize(
    "key", [key for key, one in FIELDS.items() if one.minimum is not None or one.maximum is not None]
)
def test_numbers_beyond_the_bounds_are_refused_at_their_field(key: str) -> None:
    field = FIELDS[key]
    beyond = [field.minimum - 1] if field.minimum is not None else []
    beyond += [field.maximum + 1] if field.maximum is not None else []
    for number in beyond:
        typed = {key: f"{number:.0f}", "data.sets.0.img_dir": "/a", "data.sets.1.img_dir": "/b"}
        with pytest.raises(ConfigError) as caught:
            loaded(forms.layer(FORM, typed, None))
        assert {forms.key_of(one, list(FIELDS), {}) for one in caught.value.problems} == {key}


def test_blanks_write_nothing_and_foreign_names_are_not_read() -> None:
    node, problems = forms.layer(FORM, {"lora.rank": "  ", "no.such": "1", "csrf": "x"}, None)
    assert node is not None and node.plain() == {} and problems == []


def test_a_list_of_sets_is_written_whole_with_what_lies_below() -> None:
    below = from_plain([{"img_dir": "/a", "repeats": 3}, {"img_dir": "/b", "flip": True}], "file:1")
    typed = {"data.sets.1.repeats": "2", "data.sets.2.img_dir": "/c"}
    node, _ = forms.layer(forms.sections(SCHEMA, 3), typed, below)
    assert node is not None
    assert node.plain() == {
        "data": {
            "sets": [
                {"img_dir": "/a", "repeats": 3},
                {"img_dir": "/b", "flip": True, "repeats": "2"},
                {"img_dir": "/c"},
            ]
        }
    }
    sources = {key: forms.origin(source) for key, source in leaves(node).items()}
    assert sources["data.sets.0.img_dir"] == "file" and sources["data.sets.1.repeats"] == "you"


def test_a_set_of_conversations_takes_the_place_of_one_of_images() -> None:
    below = from_plain([{"img_dir": "/a", "repeats": 3}], "file:1")
    node, _ = forms.layer(FORM, {"data.sets.0.chat_file": "/c.jsonl"}, below)
    assert node is not None
    assert node.plain() == {"data": {"sets": [{"chat_file": "/c.jsonl", "repeats": 3}]}}


def test_brackets_that_do_not_close_are_a_problem_of_their_field() -> None:
    _, problems = forms.layer(FORM, {"lora.target_modules": "[to_q"}, None)
    assert [forms.key_of(one, list(FIELDS), {}) for one in problems] == ["lora.target_modules"]


@pytest.mark.parametrize(
    ("problem", "key"),
    [
        (Problem(what="x", where="--set lora.rank"), "lora.rank"),
        (
            Problem(what="x", where="model.pretrained_model_name_or_path"),
            "model.pretrained_model_name_or_path",
        ),
        (Problem(what="`train.seed`: bad `lora.rank`", where="file.yaml:3"), "train.seed"),
        (Problem(what="bad", where="file.yaml:7"), "lora.alpha"),
        (Problem(what="no `such.key`", where="elsewhere"), ""),
    ],
)
def test_a_problem_belongs_to_a_field(problem: Problem, key: str) -> None:
    assert forms.key_of(problem, list(FIELDS), {"lora.alpha": "file.yaml:7"}) == key


@pytest.mark.parametrize(
    ("source", "word"),
    {
        "--set a.b": "you",
        "default": "default",
        "family llama": "family llama",
        "preset style": "preset style",
        "/x/y.yaml:3": "file",
    }.items(),
)
def test_sources_in_a_word(source: str, word: str) -> None:
    assert forms.origin(source) == word


def test_an_empty_mapping_removes_a_lower_one_as_in_a_file() -> None:
    node, _ = forms.layer(FORM, {"lora.rank_pattern": "{}"}, None)
    assert node is not None
    path = ("lora", "rank_pattern")
    below = from_plain({"lora": {"rank_pattern": {"to_q": 4}}}, "file")
    from_form = layers.merged(below, node).get(path)
    assert from_form is not None and from_form.plain() == {}
