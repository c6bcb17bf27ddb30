"""Programs that stand for a cluster's clients, and requests for them."""

from __future__ import annotations

from pathlib import Path

from trainer.queue.launcher import Request


def client(folder: Path, name: str, body: str) -> None:
    script = f'#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word" >>"{folder}/{name}.words"; done\n'
    (folder / name).write_text(f'{script}env >>"{folder}/{name}.env"\n{body}\n')
    (folder / name).chmod(0o755)


def words(folder: Path, name: str) -> list[str]:
    path = folder / f"{name}.words"
    return path.read_text().splitlines() if path.exists() else []


def request(folder: Path, name: str = "cats", **others: object) -> Request:
    given: dict[str, object] = {"config": "family: flux1_dev\n", "name": name, "run": folder / name, **others}
    return Request(working_folder=folder, **given)  # type: ignore[arg-type]
