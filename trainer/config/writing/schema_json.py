"""The JSON schema of a configuration file, for editors (train_configs/schema.json)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.schema import RunConfig
from trainer.config.writing.help import helps

_DIALECT = "http://json-schema.org/draft-07/schema#"


def json_schema(family_names: Sequence[str]) -> dict[str, Any]:
    """Schema of one layer: as files are merged, no key is required in one of them; a section may be null."""
    schema = RunConfig.model_json_schema(ref_template="#/definitions/{model}")
    schema["definitions"] = schema.pop("$defs")
    for name, section in schema["definitions"].items():
        if name != "DataSet":  # lists are not merged, so an item is complete
            section.pop("required", None)
        if name == "DataSet":
            section["oneOf"] = [{"required": [key]} for key in ("img_dir", "chat_file", "dataset_info")]
            section["dependencies"] = {
                "columns": ["chat_file"], "dataset_info": ["name"], "name": ["dataset_info"]
            }  # fmt: skip
        _tidy(section["properties"], helps()[name])
    schema.pop("required")
    _tidy(schema["properties"], helps()["RunConfig"])
    for name, field in schema["properties"].items():
        if "$ref" in field:
            # what a section looks like while all its keys are commented out
            description = schema["definitions"][field["$ref"].rpartition("/")[2]].get("description", "")
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], "description": description}
    schema["properties"]["family"]["enum"] = sorted(family_names)
    schema["title"] = "Training run"
    return {"$schema": _DIALECT, **schema}


def _tidy(properties: dict[str, Any], helps: Mapping[str, str]) -> None:
    """Add help, and leave out what only repeats the key."""
    for name, field in properties.items():
        field.pop("title", None)
        if "$ref" in field:
            field.pop("default", None)
        for option in field.get("anyOf", ()):
            option.pop("title", None)
        help_text = {"description": helps[name]} if name in helps else {}
        properties[name] = dict(sorted({**field, **help_text}.items()))
