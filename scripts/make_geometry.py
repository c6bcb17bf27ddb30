"""Write a family's committed geometry table from its component configs, on the meta device.

python scripts/make_geometry.py flux1_dev          # trainer/planning/shapes/tables/flux1_dev.json
python scripts/make_geometry.py flux1_dev --base DIR --output FILE
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path
from typing import Any

from trainer.files.component_shapes import Shapes
from trainer.modeling.base.meta_shapes import meta_shapes
from trainer.planning.shapes.geometry import TABLES
from trainer.planning.shapes.meta_shapes import component_class

CONFIGS = Path(__file__).parent.parent / "trainer" / "families" / "configs"


def main() -> None:
    """Parse arguments and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family")
    parser.add_argument(
        "--base", type=Path, help="folder in diffusers' layout; default: the committed configs"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    base = arguments.base or CONFIGS / arguments.family
    output = arguments.output or TABLES / f"{arguments.family}.json"
    output.write_text(table_text(arguments.family, base))
    print(output)


def table_text(family: str, base: Path) -> str:
    """The table of all components with weights, a row a line, or the name of an equal one elsewhere."""
    earlier = [path for path in sorted(TABLES.glob("*.json")) if path.stem < family]
    known = {
        json.dumps(rows): f"{path.stem}/{name}"
        for path in reversed(earlier)
        for name, rows in json.loads(path.read_text())["components"].items()
    }
    index_file = base / "model_index.json"
    index: dict[str, Any] = json.loads(index_file.read_text()) if index_file.exists() else {"": []}
    components: list[str] = []
    kept: set[str] = set()
    for name, listed in sorted(index.items()):
        if isinstance(listed, list) and (base / name / "config.json").exists():
            entry = component_class(base, name)
            rows = compact(meta_shapes(base / name, *entry))
            lines = ",\n   ".join(json.dumps(row) for row in rows)
            same = known.get(json.dumps(rows))
            value = json.dumps(same) if same else f"[\n   {lines}\n  ]"
            components.append(f"  {json.dumps(name)}: {value}")
            if entry[0] == "diffusers" and name == "transformer":
                model_class = getattr(importlib.import_module("diffusers"), entry[1])
                kept.update(model_class._keep_in_fp32_modules or ())
    fp32 = f' "kept_in_fp32": {json.dumps(sorted(kept))},\n' if kept else ""
    return "{\n" + fp32 + ' "components": {\n' + ",\n".join(components) + "\n }\n}\n"


def compact(shapes: Shapes) -> list[tuple[str, list[int], int]]:
    """The rows that `read_table` makes `shapes` of: equal shapes under indices 0..n-1 become one row."""
    groups: dict[tuple[str, tuple[int, ...]], list[tuple[int, str]]] = {}
    for name, shape in shapes.items():
        found = re.search(r"(?<=\.)\d+(?=\.)", name)
        if found is None:
            groups.setdefault((name, shape), []).append((0, name))
        else:
            pattern = f"{name[: found.start()]}{{i}}{name[found.end() :]}"
            groups.setdefault((pattern, shape), []).append((int(found[0]), name))
    rows: list[tuple[str, list[int], int]] = []
    for (pattern, shape), members in groups.items():
        if sorted(index for index, _ in members) == list(range(len(members))):
            rows.append((pattern, list(shape), len(members)))
        else:
            rows.extend((name, list(shape), 1) for _, name in members)
    return rows


if __name__ == "__main__":
    main()
