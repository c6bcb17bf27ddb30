"""The layers above the files: variables, `--set` and options, as trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.config import fields
from trainer.config.environment import CONFIG_PREFIX
from trainer.config.reading import strict_yaml
from trainer.config.tree import KeyPath, Node, at, from_plain, merge, without
from trainer.errors import Problem

CHAT_SUFFIXES = (".jsonl", ".json", ".parquet")
"""Files of conversations; any other `--dataset` is a folder of images."""
Layer = tuple[Node | None, list[Problem]]


def from_file(path: Path) -> Layer:
    """The tree of one YAML file. A section with every key commented out is an empty section, not a null."""
    return _with_empty_sections(*strict_yaml.read(path))


def from_text(text: str, name: str) -> Layer:
    """The tree of a YAML file's text, whose sources are `NAME:LINE`; as `from_file`."""
    return _with_empty_sections(*strict_yaml.settings(text, name))


def _with_empty_sections(tree: Node | None, problems: list[Problem]) -> Layer:
    if tree is not None and isinstance(tree.value, dict):
        entries = tree.value.items()
        kept = {key: node for key, node in entries if node.value is not None or not fields.is_section((key,))}
        tree = emptied(Node(value=kept, source=tree.source))
    return tree, problems


def emptied(node: Node, path: KeyPath = ()) -> Node:
    """`node` at `path`: `{}` or nothing for a mapping (`lora.rank_pattern`) empties lower layers too."""
    if not isinstance(node.value, dict) and node.value is not None:
        return node
    if not node.value and fields.takes(path, dict):
        return Node(value={}, source=node.source, whole=True)
    if node.value is None:
        return node
    value = {key: emptied(child, (*path, key)) for key, child in node.value.items()}
    return Node(value=value, source=node.source)


def from_variables(environ: Mapping[str, str]) -> list[Layer]:
    """One layer for each `TRAINER__SECTION__KEY`, in the order of their names."""
    layers = []
    for name in sorted(environ):
        if name.startswith(CONFIG_PREFIX):
            path = tuple(name.removeprefix(CONFIG_PREFIX).lower().split("__"))
            layers.append(_assign(path, environ[name], name))
    return layers


def from_overrides(overrides: Sequence[str]) -> list[Layer]:
    """One layer for each `--set a.b=c`, in the order given: a later one wins."""
    layers: list[Layer] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if equals and key.strip():
            layers.append(_assign(tuple(key.strip().split(".")), text, f"--set {key.strip()}"))
        else:
            remedy = "write for example --set train.seed=1"
            problem = Problem(what="expected KEY=VALUE", where=f"--set {override}", remedy=remedy)
            layers.append((None, [problem]))
    return layers


def from_options(
    dataset: Path | None, output: Path | None, budget: str | None = None, gpus: str | None = None
) -> list[Layer]:
    """`--dataset` replaces all data sets by one folder or file, `--output` names the run's folder, `--budget`
    is `features.memory_budget`, `--gpus` is `parallel.gpus`.
    """
    kind = "chat_file" if dataset is not None and dataset.suffix.lower() in CHAT_SUFFIXES else "img_dir"
    values = (
        (("data", "sets"), None if dataset is None else [{kind: str(dataset)}], "--dataset"),
        (("output_dir",), None if output is None else str(output), "--output"),
        (("features", "memory_budget"), budget, "--budget"),
        (("parallel", "gpus"), gpus, "--gpus"),
    )
    return [(at(path, from_plain(value, source)), []) for path, value, source in values if value is not None]


LENGTHS = (("train", "max_train_steps"), ("train", "num_train_epochs"))
"""Keys of which the highest layer that writes one says how long the run is."""


def merged(low: Node, high: Node) -> Node:
    """`high` over `low`, whose other length of the run is left out where `high` writes one."""
    written = [path for path in LENGTHS if (node := high.get(path)) is not None and node.value is not None]
    for path in LENGTHS if len(written) == 1 else ():
        if path not in written:
            low = without(low, path)
    return merge(low, high)


def _assign(path: KeyPath, text: str, source: str) -> Layer:
    """A tree with one value. Texts stay as they are; lists and mappings are written as in YAML."""
    for depth in range(1, len(path)):
        if fields.takes(path[:depth], tuple):
            remedy = f"lists are replaced whole: --set '{'.'.join(path[:depth])}=[...]'"
            return None, [Problem(what="a single item of a list cannot be set", where=source, remedy=remedy)]
    structured = fields.takes(path, tuple) or fields.takes(path, dict) or fields.is_section(path)
    if structured and text.lstrip().startswith(("[", "{")):
        node, problems = strict_yaml.parse(text, lambda line: source)
        return None if node is None else at(path, emptied(node, path)), problems
    bare = text.strip()
    if len(bare) > 1 and bare[0] == bare[-1] and bare[0] in "'\"":
        what = f"the quotes around it would be part of the value: {bare}"
        remedy = "leave the quotes out; only files, and values in [ ] or { }, have them"
        return None, [Problem(what=what, where=source, remedy=remedy)]
    value = None if text.strip() in ("", "~", "null") else text
    return at(path, emptied(Node(value=value, source=source), path)), []
