"""Every route of the app with a path that leads to something: a new one is found here by itself."""

from __future__ import annotations

import re
from pathlib import Path

from PIL import Image
from starlette.applications import Starlette
from starlette.routing import Mount, Route

from tests.unit.ui import made
from tests.unit.ui.datasets import sets
from trainer.telemetry.run_folder.tries import Try
from trainer.ui.studio import Studio, identifier


def fill(studio: Studio) -> dict[str, str]:
    """Put a run and a data set into the studio's roots; gives the path parameters that lead to them."""
    folder = made.make_run(studio.runs / "cats", done=20)
    made.samples(folder, 10, [Image.new("RGB", (64, 64), "navy")], ["a cat"])
    made.tried(
        folder, 1, Try(prompts=("a cat",), loras=("best/a.safetensors",)), [Image.new("RGB", (64, 64))] * 2
    )
    place = sets.make(studio, a="a cat")
    sets.looked(place)
    return {
        "set": place.id,
        "picture": sets.key_of(place, "cats/a.png"),
        "job": "1",
        "run": identifier(studio.runs, folder),
        "step": "10",
        "number": "0",
        "try": "1",
        "column": "1",
        "row": "0",
        "file": identifier(folder, folder / "metrics.jsonl"),
    }


def listed(app: Starlette, values: dict[str, str]) -> list[tuple[str, str]]:
    """(method, path) of every route; a parameter that `values` does not have is `none`."""
    found: list[tuple[str, str]] = []
    for route in app.routes:
        if isinstance(route, Mount):
            continue
        assert isinstance(route, Route), f"{route} is neither a route nor the static files"
        # a converter is behind the name: {step:int}
        path = re.sub(r"\{(\w+)(?::\w+)?\}", lambda found: values.get(found[1], "none"), route.path)
        found += [(method, path) for method in sorted(route.methods or ()) if method != "HEAD"]
    return found


def snapshot(root: Path) -> dict[str, bytes]:
    """Content of every file below `root`, and every folder."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else b"/"
        for path in sorted(root.rglob("*"))
    }
