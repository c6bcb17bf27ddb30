"""Cases of `trainer doctor`: files that a rule is about, beside files that are right."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.doctor import ask
from trainer.doctor.report import Report, as_json
from trainer.machine.facts import Facts, facts_from_json, version_from

HERE = Path(__file__).resolve().parent
RULES = HERE / "data" / "doctor" / "rules"
DOCUMENTS = HERE / "data" / "doctor" / "documents"
GOLDEN = HERE / "golden" / "doctor.json"


@dataclass(kw_only=True)
class Side:
    """Files of one side of a case, by name, and the places that are told."""

    machine: str = "h200"
    files: dict[str, str] = field(default_factory=dict)
    expected: list[str] = field(default_factory=list)
    """`name:line` of each finding of the case's own rule."""


def facts_of(machine: str) -> Facts:
    """A recorded machine; `NAME@10.0` with another compute capability, `NAME@cuda12.8` with another torch."""
    name, _, other = machine.partition("@")
    facts = facts_from_json((HERE / "golden" / "machines" / f"{name}.json").read_text(), name)
    if other.startswith("cuda"):
        assert facts.torch is not None
        return replace(facts, torch=replace(facts.torch, cuda=version_from(other.removeprefix("cuda"))))
    if other:
        major, minor = version_from(other)
        return replace(facts, gpus=(replace(facts.gpu, capability=(major, minor)),))
    return facts


def sides(path: Path) -> dict[str, Side]:
    """The sides of a case: `=== SIDE NAME[:LINE]` begins a file; in LINE the rule finds something.

    `crlf` behind it writes the file's lines as Windows does. `wrong` is what the rule is about; on each
    `right` all rules are silent, on each `other` this one is.
    `=== machine SIDE NAME` says for which machine a side is judged.
    """
    found: dict[str, Side] = {}
    name, end = "", "\n"
    side = Side()
    machines: dict[str, str] = {}
    for line in path.read_text().splitlines(keepends=True):
        if not line.startswith("=== "):
            side.files[name] += line.replace("\n", end)
            continue
        word, *rest = line[4:].split()
        if word == "machine":
            machines[rest[0]] = rest[1]
            continue
        side = found.setdefault(word, Side(machine=machines.get(word, "h200")))
        name, _, number = rest[0].partition(":")
        end = "\r\n" if rest[1:] == ["crlf"] else "\n"
        side.files[name] = ""
        side.expected += [f"{name}:{number}"] if number else []
    return found


def asked(side: Side, folder: Path) -> Report:
    """The doctor's report about a side's files, written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in side.files.items():
        (folder / name).write_text(text, newline="")
    return ask.about_files([folder / name for name in side.files], facts_of(side.machine))


def plain(report: Report, folder: Path) -> dict[str, Any]:
    """The report without the folder that its files were in, and without the table of names."""
    tree: dict[str, Any] = json.loads(as_json(report).replace(f"{folder}/", ""))
    return {key: value for key, value in tree.items() if key not in ("called_here", "fp8")}


def outcomes(folder: Path) -> dict[str, Any]:
    """Every report about something wrong, by the case's name; and those about the document's own files."""
    found: dict[str, Any] = {}
    for path in sorted(RULES.glob("*.txt")):
        here = folder / path.stem
        found[path.stem] = plain(asked(sides(path)["wrong"], here), here)
    for path in sorted(DOCUMENTS.glob("*.txt")):
        for name, side in sides(path).items():
            here = folder / f"{path.stem}-{name}"
            found[here.name] = plain(asked(side, here), here)
    return found


def write_golden(folder: Path) -> None:
    """Write the golden file anew."""
    GOLDEN.write_text(json.dumps(outcomes(folder), indent=1) + "\n")
