"""`trainer ui`, the studio: pages in a browser, on this machine alone unless told."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

import click

from trainer.cli.options import GivenPath
from trainer.cli.output import shown_below_options
from trainer.errors import ConfigError

DEFAULT_PORT = 8660
STATE_FOLDER = ".studio"
"""Folder of token and sessions, below that of runs unless another is named."""
_PACKAGES = ("starlette", "uvicorn", "jinja2")
_FOLDER = GivenPath(file_okay=False)


@shown_below_options
@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="Its port."
)
@click.option(
    "--allow-host", "allowed", metavar="NAME", multiple=True, help="Another name that it is asked by."
)
@click.option(
    "--published",
    metavar="ADDRESS",
    default="",
    help="Address of its host that a container's port is published on.  [default: that of --host]",
)
@click.option("--runs", type=_FOLDER, default="runs", show_default=True, help="Folder below which runs lie.")
@click.option("--data", type=_FOLDER, default="data", show_default=True, help="Folder of data sets.")
@click.option("--models", type=_FOLDER, default="models", show_default=True, help="Folder of base models.")
@click.option("--folder", type=_FOLDER, help="Folder of token and sessions.  [default: RUNS/.studio]")
@click.option(
    "--queue/--no-queue",
    default=True,
    show_default=True,
    help="Start the queue's jobs for as long as it is open.",
)
@click.option(
    "--runs-elsewhere",
    is_flag=True,
    help="Add nothing to a queue: a new run is a file, which is started on another machine.",
)
def ui(
    host: str,
    port: int,
    allowed: tuple[str, ...],
    published: str,
    runs: Path,
    data: Path,
    models: Path,
    folder: Path | None,
    queue: bool,
    runs_elsewhere: bool,
) -> None:
    """Open the studio: runs, plans and data sets as pages in a browser.
    \f
    Examples:
      trainer ui
      trainer ui --runs /output --data /data --port 0

    The first start prints a link with a token, which opens a session; later the token lies in its folder.
    No other address is ever asked. Runs are processes of their own, and outlive the studio; jobs that wait in
    the queue are started for as long as it is open (queue.log in its folder says which).
    """
    _require_packages()
    from trainer.config import environment
    from trainer.ui.serve import serve
    from trainer.ui.studio import Studio

    # as a job's run folder, with which they are compared
    named = (folder or runs / STATE_FOLDER, runs, data, models)
    own, runs, data, models = (Path(os.path.realpath(path)) for path in named)
    studio = Studio(
        folder=own,
        runs=runs,
        data=data,
        models=models,
        runtime=environment.runtime_dir(),
        starts_runs=not runs_elsewhere,
    )
    # the link is no output that `say` would clean of secrets: it is made to be copied
    starts = queue and not runs_elsewhere
    _end_with_zero()
    serve(
        studio,
        host=host,
        port=port,
        allowed=allowed,
        queue=starts,
        published=published,
        tell=click.echo,
    )


def _require_packages() -> None:
    """Raise ConfigError where the extra `ui` is not installed."""
    try:
        importlib.import_module("trainer.ui.serve")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        from trainer.words import extras

        what = f"the package {package} is not installed"
        raise ConfigError(what, where="trainer ui", remedy=extras.remedy("ui")) from error


def _end_with_zero() -> None:
    """End with 0 by SIGTERM and Ctrl-C: uvicorn, which heeds them first, raises at its end what it got."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda signum, frame: sys.exit(0))
