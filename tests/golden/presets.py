"""The features that each preset and hardware overlay resolves to on every recorded machine, in short."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from tests.golden.plans import MACHINES, ROOT, machines
from trainer import families
from trainer.config.reading.load import Loaded, load
from trainer.errors import TrainerError
from trainer.machine.facts import Facts
from trainer.machine.reading import read_recorded
from trainer.planning.planning import plan_run

GOLDEN = Path(__file__).parent / "presets.json"
PLAIN = "plain"
"""No overlay, with which the other outcomes are compared."""
_GIB = 1024**3


def overlays() -> list[str]:
    """`presets/NAME` and `hardware/NAME` of every shipped overlay."""
    folder = ROOT / "train_configs"
    return sorted(
        f"{kind}/{path.stem}" for kind in ("presets", "hardware") for path in (folder / kind).glob("*.yaml")
    )


def load_overlay(family: str, overlay: str, folder: Path) -> Loaded:
    """A family's least configuration in the empty `folder` with one overlay, given as people would."""
    conversations = families.get(family).sample_kind == "conversation"
    file = folder / f"{family}.yaml"
    data = "chat_file: /data/chat.jsonl" if conversations else "img_dir: /data"
    file.write_text(f"family: {family}\ndata: {{sets: [{{{data}}}]}}\noutput_dir: /output/run\n")
    defaults = {name: families.get(name).defaults for name in families.names()}
    kind, _, name = overlay.partition("/")
    files = [ROOT / "train_configs" / "hardware" / f"{name}.yaml"] if kind == "hardware" else []
    chosen = (name,) if kind == "presets" else ()
    return load([file, *files], chosen_presets=chosen, family_defaults=defaults, environ={})


def outcome(loaded: Loaded, facts: Facts) -> str:
    """One line: the plan's choices, or the reason why there is no plan."""
    try:
        plan = plan_run(loaded, facts, find_model=lambda _: None)
    except TrainerError as error:
        return f"{error.exit_code.value}: {textwrap.shorten(error.problems[0].what, 60, placeholder=' ...')}"
    recomputed = f"{plan.recomputed_blocks} recomputed" if plan.activation_checkpointing else "all kept"
    peak, budget = plan.peak_bytes / _GIB, plan.budget_bytes / _GIB
    return (
        f"{plan.weights}/{plan.compute}, {recomputed}, {plan.swapped_blocks} swapped,"
        f" {plan.micro_batch_size} x {plan.accumulation_steps}, {peak:.1f} of {budget:.1f} GiB"
    )


def outcomes(folder: Path) -> dict[str, Any]:
    """Overlay -> family -> machine -> line; `folder` is an empty one."""
    recorded = {name: read_recorded(MACHINES / f"{name}.json") for name in machines()}
    found: dict[str, Any] = {}
    for overlay in (PLAIN, *overlays()):
        found[overlay] = {}
        for family in families.names():
            loaded = load_overlay(family, overlay, folder)
            found[overlay][family] = {name: outcome(loaded, facts) for name, facts in recorded.items()}
    return found


def write_golden(folder: Path) -> None:
    """Rewrite the golden file, working in `folder`, which is made."""
    folder.mkdir()
    GOLDEN.write_text(json.dumps(outcomes(folder), indent=1) + "\n")
