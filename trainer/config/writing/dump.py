"""A resolved configuration as YAML text that loads to the same configuration again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from trainer.config.judging.rules import unused_keys
from trainer.config.schema import RunConfig
from trainer.errors import one_line

_MAX_COMMENT_COLUMN = 60
_LINE_BREAKS = "\n\r\x85\u2028\u2029"


def dump(config: RunConfig, sources: Mapping[str, str] | None = None) -> str:
    """Every key in the schema's order, except those without effect (`lora` with `method: full`).

    With `sources`, by dotted key, each value has its source as a comment behind it.
    """
    left_out = unused_keys(config)
    lines: list[tuple[str, str]] = []
    for key, value in config.model_dump().items():
        if isinstance(value, dict):
            kept = {name: item for name, item in value.items() if f"{key}.{name}" not in left_out}
            lines += [(f"{key}:", "")] if kept else []
            for name, item in kept.items():
                lines += entry(name, item, f"{key}.{name}", "  ")
        else:
            lines += entry(key, value, key, "")
    width = max((len(text) for text, key in lines if key and len(text) <= _MAX_COMMENT_COLUMN), default=0)
    return "".join(
        f"{text:<{width}}  # {one_line(sources[key])}\n" if sources is not None and key else f"{text}\n"
        for text, key in lines
    )


def written(config: RunConfig, sources: Mapping[str, str]) -> str:
    """YAML of the keys that neither schema nor family decided: a file that loads to `config` again."""
    plain, left_out, lines = config.model_dump(), unused_keys(config), list[str]()
    chosen = {
        key for key, source in sources.items() if source != "default" and not source.startswith("family ")
    }
    sets = enumerate(plain["data"]["sets"])
    plain["data"]["sets"] = tuple(
        {
            name: item
            for name, item in one.items()
            if item is not None and f"data.sets.{number}.{name}" in chosen
        }
        for number, one in sets
    )
    chosen |= {"data.sets"}
    for key, value in plain.items():
        if not isinstance(value, dict):
            lines += [text for text, _ in entry(key, value, key, "")] if key in chosen else []
            continue
        kept = {name: item for name, item in value.items() if f"{key}.{name}" in chosen - left_out}
        lines += [f"{key}:"] if kept else []
        for name, item in kept.items():
            lines += [text for text, _ in entry(name, item, f"{key}.{name}", "  ")]
    return "".join(f"{line}\n" for line in lines)


def entry(name: str, value: Any, key: str, indent: str) -> list[tuple[str, str]]:
    """Lines of YAML for one key, each with the dotted key of its value, or without one."""
    if not isinstance(value, tuple):
        return [(f"{indent}{name}: {_scalar(value)}", key)]
    if not value:
        return [(f"{indent}{name}: []", key)]
    lines = [(f"{indent}{name}:", "")]
    for index, item in enumerate(value):
        if isinstance(item, dict):
            for position, (inner, scalar) in enumerate(item.items()):
                dash = "  " if position else "- "
                lines.append((f"{indent}{dash}{inner}: {_scalar(scalar)}", f"{key}.{index}.{inner}"))
        else:
            lines.append((f"{indent}- {_scalar(item)}", f"{key}.{index}"))
    return lines


def _scalar(value: Any, *, inside: bool = False) -> str:
    """One value on one line; a text inside brackets, which a bare comma would split, is quoted."""
    if isinstance(value, tuple):
        return f"[{', '.join(_scalar(one, inside=True) for one in value)}]"
    if isinstance(value, dict):
        items = (
            f"{_scalar(key, inside=True)}: {_scalar(one, inside=isinstance(one, str))}"
            for key, one in value.items()
        )
        return f"{{{', '.join(items)}}}"
    if isinstance(value, Path):
        # a folder whose name begins with ~ is not somebody's home
        value = f"./{value}" if str(value).startswith("~") else str(value)
    # in PyYAML's other styles a line break becomes several lines, which not all of them survive
    broken = isinstance(value, str) and any(character in _LINE_BREAKS for character in value)
    style = '"' if broken or inside else None
    return _yaml(value, style)


@lru_cache(maxsize=1024, typed=True)
def _yaml(value: str | int | float | bool | None, style: str | None) -> str:
    """A scalar as PyYAML writes it, which takes it a third of a millisecond."""
    text: str = yaml.safe_dump(value, default_style=style, allow_unicode=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")
