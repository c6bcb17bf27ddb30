"""Write compose/variables.env anew: what compose hands from the host to the run.

python -m scripts.render_compose
"""

from __future__ import annotations

from pathlib import Path

from trainer.config import fields
from trainer.config.environment import CONFIG_PREFIX
from trainer.container.appliance import HANDED_IN, OTHERS_HANDED_IN

LISTED = Path(__file__).resolve().parent.parent / "compose" / "variables.env"
_HEAD = """\
# Written by `make docs`. The run gets these variables as they are on this machine, or in compose/.env;
# what is unset there stays unset. DOCKER.md says what they mean. Folders, port and secrets: see base.yaml.
"""


def listed() -> str:
    """The file's text: names without values."""
    keys = [CONFIG_PREFIX + key.upper().replace(".", "__") for key in fields.dotted_keys()]
    return _HEAD + "\n".join([*HANDED_IN, *OTHERS_HANDED_IN, *keys]) + "\n"


def main() -> None:
    LISTED.write_text(listed())
    print(f"wrote {LISTED}")


if __name__ == "__main__":
    main()
