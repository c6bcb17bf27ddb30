"""`trainer doctor`: other trainers' files, this environment and this machine, judged by a table of rules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trainer.cli.options import GivenPath
from trainer.cli.output import say, shown_below_options

if TYPE_CHECKING:
    from trainer.doctor.report import Report
    from trainer.errors import Problem
    from trainer.machine.facts import Facts

_FILE = GivenPath()


@shown_below_options
@click.command()
@click.argument("files", metavar="[FILE|FOLDER]...", nargs=-1, type=_FILE)
@click.option("--environment", metavar="FILE", type=_FILE, help="Variables of the run, as `env` prints them.")
@click.option(
    "--facts", metavar="FILE", type=_FILE, help="Another machine, as `trainer probe --json` wrote it."
)
@click.option("--names", is_flag=True, help="Show what each key of the files is called here.")
@click.option("--strict", is_flag=True, help="End with 78 for what is wrong, slow or unused too.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(
    files: tuple[Path, ...],
    environment: Path | None,
    facts: Path | None,
    names: bool,
    strict: bool,
    as_json: bool,
) -> int:
    """Say what is an error, wrong, slow or unused in other trainers' files, and what the same wish is called
    here: accelerate, DeepSpeed, LLaMA-Factory, axolotl and HF arguments, launch scripts, Dockerfiles, compose
    files, Kubernetes manifests, lists of packages, files of conversations.

    Files are read, never run; those that are given together are judged together: who decides where a wish is
    written twice, and what a script starts that reads a file. Without a file: this environment, its packages
    and this machine. The last line says if FP8 works here, by what `trainer probe` recorded.
    \f
    Examples:
      trainer doctor                                  # this environment, its packages and this machine
      trainer doctor ds_config.json sft.yaml run.sh   # files of one run
      trainer doctor . --names                        # a folder, with the names of its keys here
      trainer doctor sft.yaml --facts h100.json       # for another machine

    Exit codes:
      0   nothing is an error (with --strict: nothing but notes)
      69  this machine cannot do what the files ask
      78  an error in a file, or a file that cannot be read

    docs/doctor.md has the table of rules with their sources.
    """
    from trainer.cli.errors import error_text
    from trainer.doctor import judge
    from trainer.doctor.report import as_json as json_text
    from trainer.doctor.report import lines
    from trainer.errors import ConfigError

    report = _asked(files, environment, facts)
    if as_json:
        click.echo(json_text(report))
    else:
        for line in lines(report, translated=names):
            say(line)
        if report.problems:
            click.echo(error_text(ConfigError(report.problems)), err=True)
    return judge.exit_code(report.findings, report.problems, strict=strict)


def _asked(files: tuple[Path, ...], environment: Path | None, facts_file: Path | None) -> Report:
    """The doctor's report about the files, or about what is here."""
    from trainer.config import environment as variables
    from trainer.doctor import ask

    if files or environment is not None:
        return ask.about_files(files, _facts(facts_file)[0], environment)
    facts, problems = _facts(facts_file)
    machine = problems if facts is None else _stopping(facts)
    return ask.about_here(variables.snapshot(), facts, machine)


def _facts(facts_file: Path | None) -> tuple[Facts | None, tuple[Problem, ...]]:
    """The machine's facts without starting anything, or why they cannot be read; of another machine they can.

    Packages are all that are installed, where the machine is this one.
    """
    from dataclasses import replace

    from trainer.config import environment
    from trainer.doctor.surroundings import installed
    from trainer.errors import HardwareError
    from trainer.planning.planning import machine_facts

    try:
        facts = machine_facts(facts_file, starts=False)
    except HardwareError as error:
        return None, error.problems
    if facts_file is None and environment.read("TRAINER_FACTS") is None:
        facts = replace(facts, packages=installed())
    return facts, ()


def _stopping(facts: Facts) -> tuple[Problem, ...]:
    """Problems because of which no run can start on the machine, as a preflight has them."""
    from trainer.config import environment
    from trainer.container.preflight import machine_problems
    from trainer.errors import ConfigError
    from trainer.planning.planning import requested_profile

    try:
        return machine_problems(facts, requested_profile(), environment.switch("UNIFIED_MEMORY"))
    except ConfigError as error:
        return error.problems
