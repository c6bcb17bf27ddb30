"""Shapes of a component that has a config.json and no weights: its class, built by a child.

The child's answer (`trainer.modeling.base.meta_shapes`) is kept by class, config and version.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import subprocess
from pathlib import Path

from trainer.config.interpreter import python
from trainer.errors import AccessError
from trainer.files.cachefile import read_entries, write_entries
from trainer.files.component_shapes import Shapes

SOURCE = "built on the meta device from config.json"
LIBRARIES = ("diffusers", "transformers")
_TIMEOUT_SECONDS = 300.0


def built_shapes(folder: Path, component: str, cache_dir: Path) -> Shapes:
    """Shapes of the tensors that the component's files would hold; takes seconds the first time.

    Raises AccessError where no class is named for it, or the class refuses the config.
    """
    try:
        config = (folder / component / "config.json").read_text()
        library, class_name = entry = component_class(folder, component)
        if library not in LIBRARIES or not isinstance(class_name, str):
            raise ValueError(f"{component} is {entry}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AccessError(
            f"no class to build {component} with ({type(error).__name__}: {error})",
            where=str(folder / "model_index.json"),
            remedy=f'write "{component}": [LIBRARY, CLASS], with a library out of {", ".join(LIBRARIES)}',
        ) from error
    version = importlib.metadata.version(library)
    key = hashlib.sha256("\0".join((library, class_name, version, config)).encode()).hexdigest()
    return _kept(folder / component, library, class_name, cache_dir / "shapes" / f"{key}.json")


def component_class(folder: Path, component: str) -> tuple[str, str]:
    """(library, class) of a component: from model_index.json, or from the config of a language model.

    Raises OSError, ValueError, KeyError or TypeError where none is named.
    """
    if not component:
        (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
        return "transformers", architecture
    library, class_name = json.loads((folder / "model_index.json").read_text())[component]
    return library, class_name


@functools.lru_cache(maxsize=16)  # a cache folder that cannot be written costs one child, not one a question
def _kept(folder: Path, library: str, class_name: str, path: Path) -> Shapes:
    """The shapes from the file at `path`, else from a child, whose answer is written there."""
    shapes = read_entries(path).get("shapes")
    if shapes is None:
        shapes = [*_ask_child(folder, library, class_name).items()]  # a list keeps its order in the file
        write_entries(path, {"class": f"{library}.{class_name}", "shapes": shapes})
    return {name: tuple(shape) for name, shape in shapes}


def _ask_child(folder: Path, library: str, class_name: str) -> dict[str, list[int]]:
    command = python("-m", "trainer.modeling.base.meta_shapes", str(folder), library, class_name)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        # the last line of a traceback is the error itself
        lines = str(error.stderr).strip().splitlines() if error.stderr else [str(error)]
        raise AccessError(
            f"{library}.{class_name} cannot be built from this config ({lines[-1][:300]})",
            where=str(folder / "config.json"),
            remedy="correct the config, or name a folder with weights",
        ) from error
    shapes: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return shapes
