"""A configuration to start from: every key of the schema with its help and a family's value."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from trainer.config import fields
from trainer.config.judging.rules import OF_CONVERSATIONS, OF_IMAGES, unused_keys
from trainer.config.schema import DataSet, RunConfig
from trainer.config.tree import from_plain, merge
from trainer.config.writing.dump import entry
from trainer.config.writing.help import helps

_WIDTH = 110
_DECIDED = "features"
"""The section that the hardware plan decides: its keys are commented out."""


def template(family: str, defaults: Mapping[str, Any], *, conversations: bool) -> str:
    """YAML text that loads to the family's defaults, with one data set and an output folder to change.

    `defaults` are the family's layer. Keys that are null, without effect, the plan's or
    another kind of family's are commented out.
    """
    sets = [{"chat_file": "/data/chat.jsonl"} if conversations else {"img_dir": "/data"}]
    required = {"family": family, "data": {"sets": sets}, "output_dir": f"/output/{family}"}
    tree = merge(from_plain(defaults, "family"), from_plain(required, "template"))
    config = RunConfig.model_validate(tree.plain())
    left_out = unused_keys(config) | (OF_IMAGES if conversations else OF_CONVERSATIONS)
    head = (
        f"Every key of a configuration for {family}, with its default: `trainer config template {family}`."
        " Change what you need and delete the rest: what is left out keeps its default."
    )
    lines = _comment(head, "")
    for name, field in RunConfig.model_fields.items():
        section, value = fields.section_of(field.annotation), vars(config)[name]
        lines.append("")
        if section is None:
            lines += _key((name,), helps()["RunConfig"], value, commented=False)
            continue
        lines += [*_comment(section.__doc__ or "", ""), f"{name}:"]
        for inner, inner_value in vars(value).items():
            path, texts = (name, inner), helps()[section.__name__]
            if path == ("data", "sets"):
                lines += _sets(texts["sets"], sets[0])
            else:
                hidden = inner_value is None or name == _DECIDED or ".".join(path) in left_out
                lines += _key(path, texts, inner_value, commented=hidden)
    return "\n".join(lines) + "\n"


def _key(path: tuple[str, ...], texts: Mapping[str, str], value: Any, *, commented: bool) -> list[str]:
    """Help above, the value below; both indented as deep as the key is."""
    indent, mark = "  " * (len(path) - 1), "# " if commented else ""
    takes = f" Takes {fields.expected(path)}." if path != ("family",) else ""
    written = [f"{indent}{mark}{text}" for text, _ in entry(path[-1], value, ".".join(path), "")]
    return [*_comment(f"{texts[path[-1]]}{takes}", indent), *written]


def _sets(text: str, one: Mapping[str, str]) -> list[str]:
    """The list of data sets: one, whose other keys are commented out."""
    ((key, value),) = one.items()
    lines = [*_comment(text, "  "), "  sets:", f"    - {key}: {value}"]
    for name, field in DataSet.model_fields.items():
        takes = fields.expected(("data", "sets", "0", name))
        lines += _comment(f"{name}: {helps()['DataSet'][name]} Takes {takes}.", "      ")
        if name != key:
            lines += [f"      # {text}" for text, _ in entry(name, field.default, "", "")]
    return lines


def _comment(text: str, indent: str) -> list[str]:
    mark = f"{indent}# "
    return textwrap.wrap(" ".join(text.split()), _WIDTH, initial_indent=mark, subsequent_indent=mark)
