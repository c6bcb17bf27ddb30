"""`trainer fetch`: download the base model before a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from trainer.cli.options import Layers, config_arguments
from trainer.cli.output import say, shown_below_options
from trainer.words.sizes import GB

if TYPE_CHECKING:
    from trainer.modeling.base.hub import Download


@shown_below_options
@click.command()
@config_arguments
def fetch(layers: Layers) -> None:
    """Download what is missing of the base model, and of models that `validation.metrics` measures with.
    \f
    Examples:
      trainer fetch train_configs/flux1_dev_lora.yaml
      HF_HOME=/models HF_TOKEN_PATH=/run/secrets/hf trainer fetch my.yaml
      trainer fetch my.yaml --set model.revision=main

    Downloads land in HF_HOME, resume where they stopped, and ask the hub for the newest
    commit of `model.revision`; `trainer train` then uses what is here without asking.
    """
    from trainer import families
    from trainer.modeling.base.base import local_folder
    from trainer.modeling.base.source import resolve_source, weights_line
    from trainer.planning.base_check import check_base

    loaded = layers.load()
    config = loaded.config
    family, folder = families.get(config.family), local_folder(config)
    if folder is not None:
        check_base(family, loaded, folder)
    components = families.components(family)
    with contextlib.ExitStack() as stack:
        start, advance = _reporter(stack)
        source = resolve_source(
            config,
            components,
            trained=family.trained_component,
            update=True,
            on_start=start,
            on_bytes=advance,
        )
    check_base(family, loaded, source.folder)
    files = (file for name in components for file in source.component(name).iterdir())
    size = sum(file.stat().st_size for file in files if file.is_file())
    say(f"base model  {source.identity}")
    say(f"revision    {source.revision}")
    say(f"size        {size / GB:.2f} GB")
    say(f"folder      {source.folder}")
    say(f"weights     {weights_line(source, components)}")
    if config.validation.metrics:
        from trainer.engine.scoring.models import models_of

        with contextlib.ExitStack() as stack:
            start, advance = _reporter(stack)
            found = models_of(config.validation, on_start=start, on_bytes=advance)
        for kind, model in found.items():
            say(f"{kind:<12}{model.folder}")


def _reporter(stack: contextlib.ExitStack) -> tuple[Callable[[Download], None], Callable[[int, int], None]]:
    """For `resolve_source`: a function that prints the sizes and opens a bar, and one that moves it."""
    from trainer.telemetry.progress import Progress, progress

    bar: Progress | None = None
    shown = 0

    def start(download: Download) -> None:
        nonlocal bar, shown
        bar, shown = None, 0  # of another repository
        say(f"{download.repository} at {download.commit}: {download.total_bytes / GB:.2f} GB", err=True)
        here = download.total_bytes - download.missing_bytes
        say(
            f"  {here / GB:.2f} GB are here, {download.missing_bytes / GB:.2f} GB to download,"
            f" {download.free_bytes / GB:.2f} GB free in {download.folder}",
            err=True,
        )
        if download.missing_bytes:
            bar = stack.enter_context(progress(_megabytes(download.missing_bytes), "downloading (MB)"))

    def advance(done: int, total: int) -> None:
        nonlocal shown
        if bar is not None and _megabytes(done) > shown:
            bar.advance(_megabytes(done) - shown)
            shown = _megabytes(done)

    return start, advance


def _megabytes(size: int) -> int:
    return -(-size // 1_000_000)
