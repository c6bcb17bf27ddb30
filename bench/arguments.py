"""The command lines: values that argparse refuses by their name, options that several have. No torch."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer import families
from trainer.errors import AccessError

_INDEX_FILES = ("model_index.json", "config.json")


def command_parser(name: str, description: str | None, epilog: str = "") -> argparse.ArgumentParser:
    """The parser of `python -m bench NAME`; description and epilog are printed with their own line ends."""
    return argparse.ArgumentParser(
        prog=f"bench {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def listed(title: str, names: Iterable[str]) -> str:
    """An epilog with a name a line: names with commas cannot be told apart in one."""
    return "\n".join([f"{title}:", textwrap.indent("\n".join(names), "  ")])


def add_common(parser: argparse.ArgumentParser, *names: str) -> None:
    """Options of `COMMON`."""
    for name in names:
        parser.add_argument(name, **COMMON[name])


def add_choices(parser: argparse.ArgumentParser, name: str, known: Iterable[str]) -> None:
    """An option that takes one of the names that the epilog lists, and may be given several times."""
    parser.add_argument(name, action="append", choices=list(known), metavar=name[2:-1].upper(),
                        help="one of those below, only it; may be given several times")  # fmt: skip


def write_rows(path: Path | None, rows: object) -> None:
    """The rows of `--record` as JSON, where there is a path."""
    if path:
        path.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


def names_of(what: str, known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of names with commas between them, out of those that are known."""
    every = tuple(known)

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        unknown = [name for name in names if name not in every]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {what} {', '.join(unknown)}; there are {', '.join(every)}")
        return names

    return parse


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def not_negative(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def amount(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def amounts(text: str) -> tuple[float, ...]:
    """Numbers above 0 with commas between them: 16,24.5."""
    return tuple(amount(part) for part in text.split(","))


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers from 1 with commas between them: 2,4."""
    try:
        return tuple(positive(part) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 2,4") from None


def family_base(text: str) -> tuple[str, Path]:
    """FAMILY=BASE; whether the base is there is for `require_base` to say."""
    name, base = _pair(text, "FAMILY=BASE")
    return name, Path(base)


def family_counts(text: str) -> tuple[str, tuple[int, ...]]:
    """FAMILY=COUNTS: flux1_dev=2,4."""
    name, numbers = _pair(text, "FAMILY=COUNTS")
    return name, counts(numbers)


def _pair(text: str, form: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form {form}")
    if name not in families.names():
        raise argparse.ArgumentTypeError(f"no family {name!r}; there are {', '.join(families.names())}")
    return name, value


def folder(text: str) -> Path:
    """A folder that exists: a misspelt one is not to be filled."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return path


def new_file(text: str) -> Path:
    """A file in a folder that exists, so that it can be written when all is measured."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no file in a folder that exists")
    return path


def require_base(base: Path, where: str) -> Path:
    """The base model's absolute folder. Raises AccessError naming the option `where` if it cannot be one."""
    if base.is_dir() and any((base / name).is_file() for name in _INDEX_FILES):
        return base.resolve()
    what = f"has no {' or '.join(_INDEX_FILES)}" if base.is_dir() else "does not exist"
    raise AccessError(
        f"the base model's folder {base} {what}",
        where=where,
        remedy="make one: python scripts/random_base.py FAMILY --size full --no-weights --output BASE",
    )


COMMON: Mapping[str, Mapping[str, Any]] = {
    "--set": {"dest": "overrides", "action": "append", "default": [], "metavar": "KEY=VALUE",
              "help": "a setting of our run; may be given several times"},
    "--tokens": {"type": positive, "default": 512, "help": "text tokens"},
    "--jobs": {"type": positive, "default": 1, "help": "runs side by side"},
    "--record": {"type": new_file, "help": "write the results here, as JSON"},
    "--work": {"type": folder, "help": "for the runs; the system's temporary folder if not given"},
    "--month": {"help": "of the record: 2026-11; the clock's if not given"},
}  # fmt: skip
"""Options of several commands, as `add_argument` takes them."""
