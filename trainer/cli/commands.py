"""The root command and the table of commands. A new one is a row here and a file beside this."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import click

from trainer import __version__
from trainer.errors import MEANING
from trainer.words.near import closest


@dataclass(frozen=True, kw_only=True)
class Row:
    """One command: where its click object is, and its line in `trainer --help`."""

    target: str
    """`module:attribute`; imported only when the command runs or shows its own help."""
    summary: str


COMMANDS: dict[str, Row] = {
    "plan": Row(target="trainer.cli.plan:plan", summary="Show what a run will do here, and why."),
    "train": Row(target="trainer.cli.train:train", summary="Train, prove and save; resumes by itself."),
    "queue": Row(target="trainer.cli.queue:queue", summary="Have runs wait for GPUs, in their order."),
    "fetch": Row(target="trainer.cli.fetch:fetch", summary="Download the base model."),
    "cache": Row(target="trainer.cli.train:cache", summary="Encode images and captions ahead of a run."),
    "probe": Row(target="trainer.cli.probe:probe", summary="Measure this machine."),
    "sample": Row(target="trainer.cli.sample:sample", summary="Draw prompts with a LoRA."),
    "score": Row(target="trainer.cli.score:score", summary="Measure pictures: likeness, copies, KID."),
    "verify-lora": Row(target="trainer.cli.sample:verify_lora", summary="Check a LoRA file."),
    "export": Row(target="trainer.cli.files:export", summary="Write a LoRA for ComfyUI or for diffusers."),
    "merge": Row(target="trainer.cli.files:merge", summary="Write the base model with a LoRA in it."),
    "runs": Row(target="trainer.cli.runs:runs", summary="List and compare finished and running runs."),
    "compare": Row(
        target="trainer.cli.compare:compare", summary="Run configurations in turn: speed, memory, losses."
    ),
    "config": Row(target="trainer.cli.config:config", summary="Show, check or document configurations."),
    "families": Row(target="trainer.cli.families:families", summary="List the model families."),
    "doctor": Row(
        target="trainer.cli.doctor:doctor", summary="Judge files of other trainers, and this place."
    ),
    "ui": Row(target="trainer.cli.ui:ui", summary="Open the studio: runs and plans in a browser."),
    "health": Row(target="trainer.cli.health:health", summary="Say whether the run is alive."),
    "preflight": Row(target="trainer.cli.preflight:preflight", summary="Check a container before a command."),
}
"""Commands in the order in which the help lists them."""


class LazyGroup(click.Group):
    """A group whose commands come from COMMANDS and are imported one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        row = COMMANDS.get(cmd_name)
        if row is None:
            return None
        module, _, attribute = row.target.partition(":")
        command = vars(importlib.import_module(module))[attribute]
        assert isinstance(command, click.Command), row.target
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = closest(args[0], COMMANDS)
            hint = f"Did you mean '{near}'?" if near else f"Commands: {', '.join(COMMANDS)}."
            ctx.fail(f"No such command '{args[0]}'. {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # click's own version imports every command to read its first line
        with formatter.section("Commands"):
            formatter.write_dl([(name, row.summary) for name, row in COMMANDS.items()])


_EXIT_CODES = "\n".join(f"  {code.value:<3} {meaning}" for code, meaning in MEANING.items())


@click.group(
    cls=LazyGroup,
    epilog=f"""\b
Examples:
  trainer plan train_configs/flux1_dev_lora.yaml
  trainer train train_configs/flux1_dev_lora.yaml --dataset /data --output /output/my-lora
  trainer COMMAND --help

\b
Exit codes:
{_EXIT_CODES}
""",
)
@click.version_option(__version__, prog_name="trainer")
@click.option("--json", "as_json", is_flag=True, help="Print errors on stdout too, as one JSON object.")
def trainer(as_json: bool) -> None:
    """Fine-tune diffusion transformers and language models: planned, measured and proved."""
