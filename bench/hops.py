"""List the functions of `trainer` that a run enters, from a picture to the saved LoRA: a reader follows them.

    python -m bench hops
    python -m bench hops train_configs/llama_lora.yaml --set model.pretrained_model_name_or_path=BASE --list
    python -m bench hops --tree ../at-another-commit

`trainer train` runs as it is, for a few steps, with a profiler in each thread of its processes. Counted are
distinct functions and lambdas by the room that they are in; comprehensions and generated methods are not. The
way is what lies on the stack when the training loop calls the model.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from bench import arguments as types
from bench import jobs
from bench.processes import REPOSITORY
from trainer.config import environment

# every kind of work that a run has: two previews, checkpoints and held-out losses
_SHORT = (
    *("train.max_train_steps=4", "train.lr_warmup_steps=0", "validation.every_steps=2"),
    *("validation.num_inference_steps=2", "checkpoint.checkpointing_steps=2"),
)
# Python runs it before anything else in each process that finds it
_HOOK = "sitecustomize.py"
_TRAINS = "engine/__main__.py"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `trainer train` with the profiler in it; print a line a room, two sums, and the way."""
    parser = types.command_parser("hops", __doc__)
    parser.add_argument("config", type=Path, nargs="?", default=Path("train_configs/quickstart.yaml"))
    parser.add_argument("--tree", type=types.folder, default=REPOSITORY, help="a checkout, of any commit")
    parser.add_argument("--list", action="store_true", help="print every function too")
    types.add_common(parser, "--set")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hops-") as name:
        told, said = _followed(options.tree.resolve(), options.config, options.overrides, Path(name))
    training = [one for one in told if one["command"][0].endswith(_TRAINS)]
    if not training or not training[0]["way"]:
        print(said[-2000:], file=sys.stderr)
        return 1
    child, every = (sorted({name for one in ran for name in one["entered"]}) for ran in (training, told))
    print(table(every, set(child), training[0]["way"]))
    if options.list:
        print("\n".join(["", *every]))
    return 0


def _followed(
    tree: Path, config: Path, overrides: Sequence[str], folder: Path
) -> tuple[list[dict[str, Any]], str]:
    """An answer of `following.follow` for each process of the run, and everything that it said."""
    start = next((tree / "trainer" / "engine").rglob("loop.py"))
    hook = (REPOSITORY / "bench" / "following.py").read_text()
    (folder / _HOOK).write_text(f"{hook}\n\nfollow({f'{tree}/trainer'!r}, {str(start)!r}, {str(folder)!r})\n")
    own = {"PYTHONPATH": f"{folder}:{tree}", "TRAINER_CACHE_DIR": str(folder / "cache")}
    environ = {**environment.snapshot(), **own}
    ended = jobs.train([config], folder / "run", (*_SHORT, *overrides), environ, 0, tree=tree)
    answers = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return answers if ended.code == 0 else [], ended.said


def table(entered: Sequence[str], child: Collection[str], way: Sequence[str]) -> str:
    """Text: a line a room with its functions, those that the training process (`child`) enters, and files.

    Below are the sums, and the way.
    """
    of_room: dict[str, list[str]] = {}
    for name in entered:
        of_room.setdefault(name.partition(": ")[0].rpartition("/")[0] or "(top)", []).append(name)
    lines = [f"{'room':<24}{'functions':>10}{'training':>10}{'files':>7}"]
    for room, names in [*sorted(of_room.items()), ("in all", list(entered))]:
        files, trains = {name.partition(": ")[0] for name in names}, sum(name in child for name in names)
        lines.append(f"{room:<24}{len(names):>10}{trains:>10}{len(files):>7}")
    way_files = {name.partition(": ")[0] for name in way}
    lines += ["", f"from the loop to the model: {len(way)} functions in {len(way_files)} files"]
    return "\n".join([*lines, *(f"  {one}" for one in way)])
