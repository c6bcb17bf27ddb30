"""Write the tables of DOCKER.md anew, between their markers, from the tables in the code.

python -m scripts.render_docker_md            # DOCKER.md of this repository
python -m scripts.render_docker_md FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer.cli.config import variables_markdown
from trainer.container.appliance import VOLUMES
from trainer.errors import MEANING
from trainer.words.tables import markdown

DOCKER_MD = Path(__file__).resolve().parent.parent / "DOCKER.md"


def main() -> int:
    """Parse arguments and write the file; 1 where a marker is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=DOCKER_MD)
    file: Path = parser.parse_args().file
    try:
        file.write_text(rendered(file.read_text()))
    except (OSError, ValueError) as error:
        print(f"error: {file}: {error}", file=sys.stderr)
        return 1
    return 0


def rendered(text: str) -> str:
    """The page with every table in its place. Raises ValueError for a marker that is not there once."""
    for name, table in TABLES.items():
        before, after = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if text.count(before) != 1 or text.count(after) != 1:
            raise ValueError(f"it needs one line <!-- {name} --> and, below, one {after}")
        above, _, rest = text.partition(before)
        _, end, below = rest.partition(after)
        if not end:
            raise ValueError(f"{after} is above <!-- {name} -->")
        text = f"{above}{before}\n{table()}\n{after}{below}"
    return text


def _volumes() -> str:
    rows = (
        (f"`{one.path}`", "read-only" if one.access == "ro" else "read and write", one.meaning)
        for one in VOLUMES
    )
    return markdown(("folder", "access", "what it holds"), rows)


def _exit_codes() -> str:
    return markdown(("code", "meaning"), ((str(code.value), meaning) for code, meaning in MEANING.items()))


TABLES: Mapping[str, Callable[[], str]] = {
    "variables": variables_markdown,
    "volumes": _volumes,
    "exit codes": _exit_codes,
}
"""The text between each pair of markers, by their name."""


if __name__ == "__main__":
    sys.exit(main())
