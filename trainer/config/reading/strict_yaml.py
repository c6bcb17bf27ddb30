"""YAML without surprises. Plain values stay text, and everything remembers where it was written.

PyYAML alone reads `1e-4` as text, `off` as False and `010` as eight, and lets the second of two equal keys
win in silence. Here only an empty value, `~` and `null` are special; the declared types make numbers and
switches later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import yaml

from trainer.config import elsewhere
from trainer.config.tree import Node, describe
from trainer.errors import Problem
from trainer.words.near import did_you_mean

Place = Callable[[int], str]
"""Source of a value from the line, counted from 1, that it stands in."""

_NULL = "tag:yaml.org,2002:null"
_TEXT = "tag:yaml.org,2002:str"
_KNOWN_TAGS = {_NULL, _TEXT, "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}
_MAX_DEPTH = 16
_MAX_BYTES = 1 << 20
_START = "start from a file in train_configs/"
_NO_FILE = "check the path (in a container: is the folder mounted?); ready-made files are in train_configs/"


class _Refusal(yaml.MarkedYAMLError):
    """YAML that is valid but that we do not take."""

    def __init__(self, what: str, mark: yaml.Mark, remedy: str) -> None:
        super().__init__(problem=what, problem_mark=mark)
        self.remedy = remedy


class _Composer(yaml.composer.Composer, yaml.resolver.BaseResolver):
    """PyYAML's composer that resolves nothing but null, and refuses anchors, aliases and deep nesting."""

    depth = 0
    takes_anchors = False

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[attr-defined]
        if event.anchor is not None and not self.takes_anchors:
            remedy = (
                "quote a text that starts with & or *; put settings that are shared in a file of their own"
            )
            raise _Refusal("anchors (&) and aliases (*) are not supported", event.start_mark, remedy)
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            what, remedy = f"nested more than {_MAX_DEPTH} deep", "check brackets and indentation"
            raise _Refusal(what, event.start_mark, remedy)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Composer.yaml_implicit_resolvers = {}
_Composer.add_implicit_resolver(_NULL, re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])


class _PythonLoader(_Composer, yaml.SafeLoader):
    """PyYAML's own parser: slow, and `_WORDS` knows its messages."""


if yaml.__with_libyaml__:

    class _LibyamlLoader(_Composer, yaml.CSafeLoader):
        """libyaml's parser: ten times as fast."""

        __init__ = yaml.CSafeLoader.__init__


class _ForeignLoader(_LibyamlLoader if yaml.__with_libyaml__ else _PythonLoader):  # type: ignore[misc]
    """The same for files of others, who may use anchors."""

    takes_anchors = True

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.anchors: dict[str, yaml.Node] = {}


_UNUSUAL = re.compile(r"[\t\r\x85\u2028\u2029\ufeff]|---|(?<!\w)!|[|>][-+\d]*#")
"""Tabs, unusual line breaks, several documents, tags, and `|#` for `| #`."""
_BRACKET = re.compile(r"^(?! *#)[^\n\[{]*[\[{]", re.MULTILINE)
"""The first bracket outside of comments: within brackets the parsers differ on `?`."""


def _root(text: str) -> yaml.Node | None:
    """The root node, with PyYAML's lines, strictness and messages whichever parser reads the text.

    libyaml takes some texts that PyYAML's parser refuses or reads otherwise: these, and every text with a
    mistake, are PyYAML's to read. A PyYAML that was built without libyaml reads all of them.
    """
    bracket, last = _BRACKET.search(text), max(text.rfind("]"), text.rfind("}"))
    differ = _UNUSUAL.search(text) or (bracket and "?" in text[bracket.end() : last])
    if yaml.__with_libyaml__ and not differ:
        with suppress(yaml.YAMLError):
            root: yaml.Node | None = _LibyamlLoader(text).get_single_node()
            return root
    return _PythonLoader(text).get_single_node()


def read(path: Path) -> tuple[Node | None, list[Problem]]:
    """The tree in the file `path` and what is wrong with it; never raises for anything that a file can be."""

    def refused(what: str, where: str = str(path), remedy: str = _START) -> tuple[None, list[Problem]]:
        return None, [Problem(what=what, where=where, remedy=remedy)]

    if path.suffix.lower() == ".toml" and path.is_file():
        return refused("this is TOML, a configuration is YAML")
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except IsADirectoryError:
        return refused("this is a directory", remedy="name a YAML file in it")
    except FileNotFoundError:
        foreign = elsewhere.file(path.name)
        remedy = did_you_mean(path.name, _neighbours(path)) + _NO_FILE
        return refused("no such file", remedy=remedy if foreign is None else foreign.remedy)
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        return refused(what, remedy="check the path, its owner and permissions")
    if len(raw) > _MAX_BYTES:
        return refused("too large for a configuration (over 1 MiB)")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        what = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        return refused(what, f"{path}:{line}", "save the file as UTF-8")
    return settings(text, str(path))


def _neighbours(path: Path) -> list[str]:
    """Names of the YAML files beside it; none where there is no such folder or it cannot be read."""
    with suppress(OSError):
        return sorted(one.name for one in path.parent.iterdir() if one.suffix in (".yaml", ".yml"))
    return []


def settings(text: str, name: str) -> tuple[Node | None, list[Problem]]:
    """The tree of a file's text and what is wrong with it; sources are `NAME:LINE`."""
    tree, problems = parse(text, lambda line: f"{name}:{line}")
    if tree is None and not problems:
        return None, [Problem(what="the file holds no settings", where=name, remedy=_START)]
    if tree is not None and not isinstance(tree.value, dict):
        what = f"expected sections such as `train:`, got {describe(tree)}"
        return None, [*problems, Problem(what=what, where=tree.source, remedy=_START)]
    return tree, problems


def parse(text: str, place: Place) -> tuple[Node | None, list[Problem]]:
    """The tree in `text` and what is wrong with it; None if it is empty or could not be read at all."""
    control = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if control is not None:
        line = text.count("\n", 0, control.start()) + 1
        what = f"control character U+{ord(control.group()):04X}"
        remedy = "remove it; the file may be damaged, or not be text at all"
        return None, [Problem(what=what, where=place(line), remedy=remedy)]
    problems: list[Problem] = []
    try:
        root = _root(text)
        tree = None if root is None else _convert(root, root.start_mark.line, place, problems)
    except yaml.MarkedYAMLError as error:
        return None, [*problems, _explain(error, text, place)]
    return tree, problems


def documents(text: str, place: Place) -> tuple[list[yaml.Node], list[Problem]]:
    """Roots of the documents of another program's YAML, and what is wrong with it; never raises.

    Anchors, tags and several documents are theirs to use. An alias is the node that it names, also in itself.
    """
    control = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if control is not None:
        line = text.count("\n", 0, control.start()) + 1
        what = f"control character U+{ord(control.group()):04X}"
        return [], [Problem(what=what, where=place(line), remedy="remove it; the file may be damaged")]
    loader, roots = _ForeignLoader(text), list[yaml.Node]()
    try:
        while loader.check_node():
            roots.append(loader.get_node())
    except yaml.MarkedYAMLError as error:
        return roots, [_explain(error, text, place)]
    except yaml.YAMLError as error:
        return roots, [Problem(what=f"not valid YAML: {error}", where=place(1), remedy="save it as UTF-8")]
    return roots, []


def _convert(node: yaml.Node, line: int, place: Place, problems: list[Problem]) -> Node:
    """PyYAML's node as ours; `line` is counted from 0, like PyYAML's marks."""
    source = place(line + 1)
    if node.tag not in _KNOWN_TAGS:
        what = f"the tag {node.tag} is not supported"
        raise _Refusal(what, node.start_mark, "quote a text that starts with !")
    if isinstance(node, yaml.MappingNode):
        return Node(value=dict(_entries(node, place, problems)), source=source)
    if isinstance(node, yaml.SequenceNode):
        items = [_convert(item, item.start_mark.line, place, problems) for item in node.value]
        return Node(value=items, source=source)
    return Node(value=None if node.tag == _NULL else str(node.value), source=source)


def _entries(node: yaml.MappingNode, place: Place, problems: list[Problem]) -> Iterator[tuple[str, Node]]:
    """Key and value of each entry, the first of equal keys. A value's line is its key's."""
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line
        if not isinstance(key, yaml.ScalarNode) or key.tag != _TEXT:
            remedy = "write `key: value`; quote texts in { }"
            raise _Refusal("a key must be a plain word", key.start_mark, remedy)
        if key.value == "<<":
            raise _Refusal("merge keys (<<) are not supported", key.start_mark, "name several files instead")
        child = _convert(value, line, place, problems)
        if key.value in seen:
            what = f"`{key.value}` is written twice; the first is in line {seen[key.value]}"
            problems.append(Problem(what=what, where=place(line + 1), remedy="keep one of the two"))
            continue
        seen[key.value] = line + 1
        yield key.value, child


_WORDS: tuple[tuple[str, str, str], ...] = (
    (r"'\\t'", "a tab where only spaces can stand", "use spaces for indentation"),
    (r"another document", "a second document starts here (---)", "use one file for each"),
    (r"mapping values are not allowed", "a `:` where none can stand",
     "quote a text that holds `: `, and check the indentation of this line and the one above"),
    (r"end of stream|<stream end>", "what is opened here is never closed", "close the quote or bracket"),
)  # fmt: skip
"""PyYAML's wording -> ours, with the remedy."""


def _explain(error: yaml.MarkedYAMLError, text: str, place: Place) -> Problem:
    """PyYAML's error in plain words."""
    problem = str(error.problem)
    mark = error.problem_mark or error.context_mark
    if error.context_mark is not None and re.search("end of stream|<stream end>", problem):
        mark = error.context_mark  # the end of the file is where it was noticed, not where it is wrong
    line = 0 if mark is None else mark.line
    if isinstance(error, _Refusal):
        return Problem(what=problem, where=place(line + 1), remedy=error.remedy)
    lines = text.splitlines()
    if line < len(lines) and re.match(r" *\t", lines[line]):
        problem = r"'\t'"
    for pattern, what, remedy in _WORDS:
        if re.search(pattern, problem):
            return Problem(what=what, where=place(line + 1), remedy=remedy)
    remedy = "check indentation and brackets here and in the line above; quote texts with special characters"
    return Problem(what=f"not valid YAML: {problem}", where=place(line + 1), remedy=remedy)
