"""Write a base model with random weights, in diffusers' layout, without network.

    python scripts/random_base.py flux1_dev --size tiny --output build/base
    python scripts/random_base.py flux1_dev --size full --no-weights --output build/flux1_dev_full

`tiny` is for tests and the demo: every component has its real class and is 2 MB at most. `full` writes
only the real configs and small tokenizers, for `model.weights: random`. Equal arguments give equal bytes.
A new family is one module of tests/random_bases and an entry of tiny.yaml there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when it is run as a file

from tests import random_bases
from trainer.modeling.quiet import quiet_libraries


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
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    try:
        random_bases.build(
            given.family, given.size, given.output, weights=not given.no_weights, seed=given.seed
        )
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
