"""Write a base model with random weights, in diffusers' layout, without network.

    python scripts/random_base.py flux1_dev --size tiny --output build/base
    python scripts/random_base.py flux1_dev --size full --no-weights --output build/flux1_dev_full

`tiny` is for tests and the demo: every component has its real class and is 2 MB at most. `full` writes
only the real configs and small tokenizers, for `model.weights: random`. Equal arguments give equal bytes.
A new family is one module of scripts/random_bases.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # also when it is run as a file

from scripts import random_bases  # noqa: E402
from trainer.modeling.quiet import quiet_libraries  # noqa: E402

CONFIGS = REPOSITORY / "trainer" / "families" / "configs"


def build(
    family: str, size: Literal["tiny", "full"], output: Path, *, weights: bool = True, seed: int = 0
) -> None:
    """Write the base model of `family` into `output`, which must be empty or new.

    Raises ValueError for a full-size model with weights, FileExistsError where the folder holds something.
    """
    if size == "full" and weights:
        raise ValueError(
            "full-size random weights are not written to disk; use --no-weights and `model.weights: random`"
        )
    if output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty")
    quiet_libraries()
    base = random_bases.get(family)
    shutil.copytree(CONFIGS / family, output, dirs_exist_ok=True)
    tokenizers = {name: make() for name, make in base.tokenizers.items()}
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(output / name)
    if size == "tiny":
        classes = base.classes or json.loads((output / "model_index.json").read_text())
        for name, config in base.tiny_configs(tokenizers).items():
            library, class_name = classes[name]
            model_class = getattr(importlib.import_module(library), class_name)
            prepare = functools.partial(base.prepare, name)
            _write_model(model_class, config, output / name, prepare, weights=weights, label=f"{seed}/{name}")


def _write_model(
    model_class: Any,
    config: Mapping[str, Any],
    folder: Path,
    prepare: Callable[[Any], None],
    *,
    weights: bool,
    label: str,
) -> None:
    """One model with its library's own initialisation, seeded by `label`."""
    from transformers import PreTrainedModel

    from trainer.modeling.seeds import seeded
    from trainer.modeling.tensor_file import rewrite_sorted

    with seeded(label, "cpu"):
        if issubclass(model_class, PreTrainedModel):
            model = model_class(model_class.config_class(**config))
        else:
            model = model_class(**config)
        prepare(model)
    model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):
        if weights:
            rewrite_sorted(path, {})
        else:
            path.unlink()


def main() -> None:
    """The command line."""
    quiet_libraries()
    import transformers

    parser = argparse.ArgumentParser(
        description="Write a base model with random weights, in diffusers' layout, without network."
    )
    parser.add_argument("family", choices=sorted(random_bases.FAMILIES))
    parser.add_argument("--size", choices=("tiny", "full"), default="tiny")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--no-weights", action="store_true", help="configs and tokenizers only")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    try:
        build(
            arguments.family,
            arguments.size,
            arguments.output,
            weights=not arguments.no_weights,
            seed=arguments.seed,
        )
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
