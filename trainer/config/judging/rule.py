"""A rule that a configuration can break, as a row of data, and the one runner of such rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trainer.config.schema import RunConfig
from trainer.config.tree import by_user
from trainer.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Context:
    """Everything that a rule may look at. Rules that look at more have a context that extends this one."""

    config: RunConfig
    sources: Mapping[str, str]
    environ: Mapping[str, str]
    lora_presets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of LoRA target presets by family; a family that is not in it is not checked."""

    def source(self, key: str) -> str:
        """Place where `key` was written; the family or `default` if nobody wrote it."""
        return self.sources.get(key, "default")

    def written(self, key: str) -> bool:
        """True if the user wrote `key`, in whatever layer."""
        return by_user(self.source(key))

    def blame(self, *keys: str) -> str:
        """Source of the first of `keys` that the user wrote: the place to change."""
        return next((self.source(key) for key in keys if self.written(key)), self.source(keys[0]))


C = TypeVar("C", bound=Context)
Clash = Mapping[str, str]
"""Words for the texts of one problem. Its place is `where`, or the source of `key`, if the clash has them."""


@dataclass(frozen=True)
class Rule(Generic[C]):
    """One contradiction.

    In the texts `{lora.rank}` is the value of a key, `{@lora.rank}` its source, `{=lora.rank}` both with the
    key, and `{word}` a word of the clash.
    """

    keys: tuple[str, ...]
    """The rule is left out where one of these is bad. The place is the first of them that the user wrote."""
    clashes: Callable[[C], bool | Iterable[Clash]]
    """Answers True for a contradiction, or yields the words of each contradiction that it finds."""
    what: str
    remedy: str
    at: tuple[str, ...] = ()
    """Keys of which one is the place, where not all of `keys` may be."""


def check(rules: Iterable[Rule[C]], context: C, bad: frozenset[str] = frozenset()) -> list[Problem]:
    """The problems of those `rules` that look at no key in `bad`."""
    problems = []
    for rule in rules:
        if any(_related(key, name) for key in rule.keys for name in bad):
            continue
        found = rule.clashes(context)
        for words in ({},) if found is True else found or ():
            place = context.source(words["key"]) if "key" in words else context.blame(*rule.at or rule.keys)
            what, remedy = (_filled(text, context, words) for text in (rule.what, rule.remedy))
            problems.append(Problem(what=what, where=words.get("where", place), remedy=remedy))
    return problems


def _related(one: str, other: str) -> bool:
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def _filled(text: str, context: Context, words: Clash) -> str:
    """`text` with words, values and sources in place of their names."""

    def fill(found: re.Match[str]) -> str:
        mark, key = found.groups()
        if key in words:
            return words[key]
        section, _, name = key.rpartition(".")
        config = vars(context.config)
        value = vars(config[section])[name] if section else config[name]
        written = str(value).lower() if isinstance(value, bool) else str(value)
        source = context.source(key)
        return {"": written, "@": source, "=": f"`{key}: {written}` ({source})"}[mark]

    return re.sub(r"\{([@=]?)([\w.]+)\}", fill, text)
