"""The project's measurements of itself, one command a subject.

python -m bench train flux1_dev --base FOLDER     # a step of ours beside others'
python -m bench page                              # docs/benchmarks.md from docs/benchmarks/*.json
python -m bench COMMAND --help
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from trainer.cli.errors import error_text
from trainer.errors import TrainerError

COMMANDS = {
    "train": "a training step of ours beside those that others write",
    "matrix": "every family in the plans that people run, on sets of real shape",
    "ranks": "a step of several GPUs beside one GPU's",
    "stops": "runs of several GPUs that are stopped, killed, gone on with and launched in other ways",
    "queue": "four jobs of the queue over two GPUs, of which another program uses one at first",
    "profile": "where the milliseconds of a step go",
    "reading": "a base model's files read by several GPUs beside one",
    "load": "how fast a base model's files reach the device",
    "save": "how long checkpoints and exports take",
    "memory": "what the memory plan predicts beside what is measured",
    "recipes": "full fine-tunes in FP8 beside bf16 and torchao's recipes",
    "full": "what plans of full fine-tunes say beside what is measured",
    "count": "what a block keeps for backward, from which memory is planned",
    "sweep": "what auto picks under a budget beside the best of all settings",
    "overhead": "what a step costs beside its mathematics",
    "converge": "whether faster settings learn what bf16 learns",
    "plan": "how long planning takes",
    "ui": "how soon the studio starts and paints, with large folders too, its memory and its idle time",
    "hops": "which functions of the trainer a run enters",
    "trained": "what the optimizer's step and the products of trained weights cost",
    "rows": "which numbers of rows FP8 products are refused for",
    "page": "write docs/benchmarks.md and its plots",
}
"""In the order in which the help lists them; the module of the same name does the work."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Hand the rest of the command line to the command's module; gives the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *rest = given
    if name not in COMMANDS:
        print(f"no command {name!r}\n{usage()}", file=sys.stderr)
        return 2
    # imported here: `page` needs no torch
    module = importlib.import_module(f"bench.{name}")
    try:
        return int(module.main(rest) or 0)
    except TrainerError as error:
        print(error_text(error), file=sys.stderr)
        return int(error.exit_code)


def usage() -> str:
    """The commands, one a line."""
    lines = [f"  {name:<8} {what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: python -m bench COMMAND [ARGUMENTS]", "", *lines])


if __name__ == "__main__":
    sys.exit(main())
