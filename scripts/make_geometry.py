"""Write a family's committed geometry table from its component configs, on the meta device.

python scripts/make_geometry.py flux1_dev          # trainer/hardware/tables/flux1_dev.json
python scripts/make_geometry.py flux1_dev --base DIR --output FILE
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from trainer.hardware.geometry import TABLES, compact

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
    output.write_text(table_text(base))
    print(output)


def table_text(base: Path) -> str:
    """The table of all components with weights in the base's model_index.json, one row a line."""
    index: dict[str, Any] = json.loads((base / "model_index.json").read_text())
    components = []
    for name, entry in sorted(index.items()):
        if isinstance(entry, list) and (base / name / "config.json").exists():
            rows = ",\n   ".join(json.dumps(row) for row in compact(meta_shapes(base / name, *entry)))
            components.append(f"  {json.dumps(name)}: [\n   {rows}\n  ]")
    return '{\n "components": {\n' + ",\n".join(components) + "\n }\n}\n"


def meta_shapes(folder: Path, library: str, class_name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that the component's files would hold; tied weights count once."""
    import torch

    component_class = getattr(importlib.import_module(library), class_name)
    # shapes only: that some rope tables stay on meta, which forbids this for training, does not matter here
    with torch.device("meta"):
        if library == "transformers":
            module = component_class(component_class.config_class.from_pretrained(folder))
        else:
            module = component_class.from_config(component_class.load_config(folder))
    # named_parameters() leaves repeated (tied) tensors out, state_dict() does not
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


if __name__ == "__main__":
    main()
