"""Parameter shapes of a component's class, printed as JSON.

`python -m trainer.modeling.base.meta_shapes FOLDER LIBRARY CLASS`.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from pathlib import Path

from trainer.modeling.vision import make_torchvision_importable


def meta_shapes(folder: Path, library: str, class_name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that the component's files would hold; tied weights count once."""
    make_torchvision_importable()
    import torch

    model_class = getattr(importlib.import_module(library), class_name)
    # shapes only: that some rope tables stay on meta, which forbids this for training, does not matter here
    with torch.device("meta"):
        if library == "transformers":
            module = model_class(model_class.config_class.from_pretrained(folder))
        else:
            module = model_class.from_config(model_class.load_config(folder))
    # named_parameters() leaves repeated (tied) tensors out, state_dict() does not
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


if __name__ == "__main__":
    gc.disable()  # importing makes a million objects and hardly any garbage
    print(json.dumps(meta_shapes(Path(sys.argv[1]), sys.argv[2], sys.argv[3])))
