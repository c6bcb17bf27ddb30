"""Write the golden files anew: `make golden`. Read the diff before you commit it."""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path

from tests import doctor_cases
from tests.golden import losses, plans, presets
from tests.tiny import build_tiny
from trainer.planning.render import plan_text


def main() -> None:
    """Rewrite every golden plan, what presets resolve to, what the doctor says, and losses that changed."""
    os.chdir(plans.ROOT)
    with tempfile.TemporaryDirectory() as folder:
        for machine in plans.machines():
            path = plans.PLANS / f"{machine}.txt"
            path.write_text(plans.machine_text(machine))
            print(path.relative_to(plans.ROOT))
        for machine in plans.machines_of_several():
            path = plans.PLANS / f"{machine}.txt"
            path.write_text(f"{plan_text(plans.shared_plan(machine))}\n")
            print(path.relative_to(plans.ROOT))
        work = Path(folder)
        doctor_cases.write_golden(work / "doctor")
        print(doctor_cases.GOLDEN.relative_to(plans.ROOT))
        presets.write_golden(work / "presets")
        print(presets.GOLDEN.relative_to(plans.ROOT))
        base = functools.cache(lambda family: build_tiny(family, work / "tiny" / family))
        for path in losses.write_losses(base, work):
            print(path.relative_to(plans.ROOT))


if __name__ == "__main__":
    main()
