"""Floor 7: `trainer probe`: what this machine is and which attention kernels work on it."""

from __future__ import annotations

from pathlib import Path

import click

from trainer.cli.options import layer_options, load_config


@click.command(
    epilog="""\b
Examples:
  trainer probe                                    # facts about this machine
  trainer probe train_configs/flux1_dev_lora.yaml  # and the kernels, measured at the run's shape
  trainer probe --json > my-machine.json           # facts for `trainer plan --facts`
"""
)
@click.argument("configs", metavar="[CONFIG]...", nargs=-1, type=click.Path(path_type=Path))
@layer_options
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
def probe(
    configs: tuple[Path, ...],
    overrides: tuple[str, ...],
    dataset: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Measure this machine: facts, and with a configuration every attention kernel forward and backward."""
    from trainer.cli.jobs import probe_kernels
    from trainer.engine.planning import machine_facts
    from trainer.hardware.facts import facts_to_json

    facts = machine_facts()
    if configs:
        facts = probe_kernels(load_config(configs, overrides, dataset, output), facts)
    if as_json:
        click.echo(facts_to_json(facts))
        return 0
    for line in describe(facts_to_json(facts)):
        click.echo(line)
    return 0


def describe(text: str) -> list[str]:
    """The facts as lines of `name: value` for people, verdicts last."""
    import json

    facts = json.loads(text)
    verdicts = facts.pop("verdicts", [])
    lines = [f"{name}: {json.dumps(value)}" for name, value in facts.items()]
    for verdict in verdicts:
        speed = f"{verdict['milliseconds']} ms" if verdict["milliseconds"] is not None else "-"
        state = "works" if verdict["works"] else "FAILS"
        kernel, at = verdict["kernel"], verdict["shape_class"]
        lines.append(f"{kernel:22} {state:6} {speed:>12}  {at}: {verdict['reason']}")
    return lines
