"""Base models with random weights, tiny and of full size: one module a family, and its sizes in tiny.yaml."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Literal

import yaml

from tests.random_bases.common import Base
from trainer import families
from trainer.modeling.quiet import quiet_libraries

FAMILIES = families.names()
CONFIGS = Path(__file__).resolve().parents[2] / "trainer" / "families" / "configs"
"""The component configs of the published bases, by family."""
SIZES = Path(__file__).with_name("tiny.yaml")


def build(
    family: str, size: Literal["tiny", "full"], output: Path, *, weights: bool = True, seed: int = 0
) -> None:
    """Write the base model of `family`, in diffusers' layout, into `output`, which must be empty or new.

    `tiny` has every component's real class, 2 MB each at most; `full` has configs and small tokenizers alone.
    Equal arguments give equal bytes. Raises ValueError for a full-size model with weights, FileExistsError
    where the folder holds something.
    """
    if size == "full" and weights:
        raise ValueError(
            "full-size random weights are not written to disk; use --no-weights and `model.weights: random`"
        )
    if output.is_dir() and any(output.iterdir()):
        raise FileExistsError(f"{output} is not empty")
    quiet_libraries()
    from transformers import PreTrainedModel

    from trainer.modeling.seeds import seeded
    from trainer.modeling.tensor_file import rewrite_sorted

    base: Base = vars(importlib.import_module(f"tests.random_bases.{family}"))["BASE"]
    shutil.copytree(CONFIGS / family, output, dirs_exist_ok=True)
    tokenizers = {name: make() for name, make in base.tokenizers.items()}
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(output / name)
    if size == "tiny":
        classes = base.classes or json.loads((output / "model_index.json").read_text())
        sizes = yaml.safe_load(SIZES.read_text())[family]
        encoders = base.encoders(tokenizers)
        for name in dict.fromkeys([*sizes, *encoders]):
            config = {**sizes.get(name, {}), **encoders.get(name, {})}
            library, class_name = classes[name]
            model_class = getattr(importlib.import_module(library), class_name)
            with seeded(f"{seed}/{name}", "cpu"):
                if issubclass(model_class, PreTrainedModel):
                    model = model_class(model_class.config_class(**config))
                else:
                    model = model_class(**config)
                base.prepare(name, model)
            model.save_pretrained(output / name)
            for path in (output / name).glob("*.safetensors"):
                if weights:
                    rewrite_sorted(path, {})
                else:
                    path.unlink()
