"""Settings of the studio: sessions, folders, two secrets that are written and never shown, versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.config import environment
from trainer.errors import ConfigError
from trainer.files import atomic
from trainer.telemetry.supervising import webhook
from trainer.ui.access import SESSION_SECONDS, TOKEN_FILE, Access, Session
from trainer.ui.studio import Studio, UnknownIdError
from trainer.ui.views.bar import there

VENDOR = Path(__file__).parents[1] / "static/vendor"
_PACKAGES = ("starlette", "uvicorn", "jinja2", "python-multipart")
_ID_DIGITS = 16
_LONGEST = 2048


@dataclass(frozen=True, kw_only=True)
class SessionRow:
    """A browser that is logged in."""

    id: str
    began_unix_seconds: float
    ends_unix_seconds: float
    own: bool
    """Whether it is the one that asks."""


@dataclass(frozen=True, kw_only=True)
class Root:
    """A folder that the studio reads or writes."""

    name: str
    path: str
    problem: str
    """Why it cannot be used; empty where it can."""
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class SecretView:
    """A secret: whether there is one and where, never its text."""

    file: str
    is_set: bool
    writable: bool
    """Whether the studio may keep it for runs that are started here."""
    note: str
    """Conditions under which it counts."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A program that the studio is made of."""

    name: str
    version: str
    licence: str
    text: str
    """Name of its licence's file among the vendored ones; empty for packages of Python."""


@dataclass(frozen=True, kw_only=True)
class SettingsView:
    """The page."""

    token_file: str
    sessions: tuple[SessionRow, ...]
    roots: tuple[Root, ...]
    hub_token: SecretView
    webhook: SecretView
    parts: tuple[Part, ...]


def settings_view(studio: Studio, access: Access, session: Session) -> SettingsView:
    """The page as the browser of `session` sees it. Changes nothing."""
    return SettingsView(
        token_file=str(studio.folder / TOKEN_FILE),
        sessions=tuple(
            SessionRow(
                id=key[:_ID_DIGITS],
                began_unix_seconds=ends - SESSION_SECONDS,
                ends_unix_seconds=ends,
                own=key == session.key,
            )
            for key, ends in access.sessions
        ),
        roots=roots(studio),
        hub_token=_hub_token(studio),
        webhook=_webhook(studio),
        parts=(*_python(), *_vendored()),
    )


def sign_out(access: Access, session_id: str) -> None:
    """End the session with that id. Raises UnknownIdError."""
    found = [key for key, _ in access.sessions if key[:_ID_DIGITS] == session_id]
    if not found:
        raise UnknownIdError(session_id)
    access.log_out(found[0])


def roots(studio: Studio) -> tuple[Root, ...]:
    """The studio's folders: what is wrong with each, and the free space of its disk."""
    folders = (
        ("Runs", studio.runs, True),
        ("Data sets", studio.data, False),
        ("Base models", studio.models, False),
        ("The studio's own", studio.folder, True),
        ("Queue", environment.queue_dir().absolute(), True),
        ("Encoded samples", environment.user_cache_dir().absolute(), True),
    )
    return tuple(_root(name, path, written) for name, path, written in folders)


def _root(name: str, path: Path, written: bool) -> Root:
    existing = there(path)
    problem = ""
    if written and not os.access(existing, os.W_OK | os.X_OK):
        problem = "this user may not write there"
    elif not written and not os.path.isdir(path):  # noqa: PTH112
        problem = "it is not there"
    return Root(name=name, path=str(path), problem=problem, free_bytes=shutil.disk_usage(existing).free)


# ---- secrets


def hub_token_file() -> Path:
    """The file from which runs read the hub's access token."""
    named = environment.read("HF_TOKEN_PATH")
    home = environment.read("HF_HOME") or Path(
        environment.read("XDG_CACHE_HOME") or "~/.cache", "huggingface"
    )
    return environment.at_home(named or str(Path(home, "token")), "HF_TOKEN_PATH")


def webhook_file(studio: Studio) -> Path:
    """The file of the webhook's address: the one that runs read, else one of the studio's own."""
    named = environment.read(webhook.FILE_VARIABLE)
    return environment.at_home(named, webhook.FILE_VARIABLE) if named else studio.folder / "webhook"


def have_webhook_file(studio: Studio) -> None:
    """Make the studio's own file of the webhook, empty, where it is missing: a run that is told of a file
    which is not there fails. Raises StorageError.
    """
    path = webhook_file(studio)
    if environment.read(webhook.FILE_VARIABLE) is None and not path.exists():
        _keep(path, "")


def set_hub_token(text: str) -> None:
    """Keep an access token of the hub, none where `text` is empty. Raises ConfigError, StorageError."""
    token = text.strip()
    if not token.isascii() or not token.isprintable() or " " in token or len(token) > _LONGEST:
        remedy = "copy it whole from the hub's page of access tokens; it has no blanks"
        raise ConfigError("that is no access token", where="HF token", remedy=remedy)
    _keep(hub_token_file(), token)


def set_webhook(studio: Studio, text: str) -> None:
    """Keep the webhook's address, none where `text` is empty. Raises ConfigError, StorageError."""
    path, address = webhook_file(studio), text.strip()
    if address:
        trial = studio.folder / ".webhook.trial"
        try:
            _keep(trial, address[:_LONGEST])
            # judged by what reads it when a run ends
            webhook.configured({webhook.FILE_VARIABLE: str(trial)})
        except ConfigError as error:
            remedy = "give one address, https://HOST/PATH"
            raise ConfigError(
                "that is no https address without a user name", where="webhook", remedy=remedy
            ) from error
        finally:
            trial.unlink(missing_ok=True)
    _keep(path, address[:_LONGEST])


def _keep(path: Path, text: str) -> None:
    """Write a secret that this user alone may read. An empty file is none, to the hub's library too."""
    temporary = path.with_name(f".{path.name}.new")
    with atomic.no_space_told(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.replace(path)


def _hub_token(studio: Studio) -> SecretView:
    note = ""
    if environment.read("HF_TOKEN") or environment.read("HF_TOKEN_FILE"):
        note = "The environment has a token, which counts before this file."
    return _secret(studio, hub_token_file(), note)


def _webhook(studio: Studio) -> SecretView:
    note = ""
    if not environment.read(webhook.FILE_VARIABLE):
        note = f"Runs that the studio starts read it; others do where {webhook.FILE_VARIABLE} names it."
    return _secret(studio, webhook_file(studio), note)


def _secret(studio: Studio, path: Path, note: str) -> SecretView:
    writable = studio.starts_runs and os.access(there(path.parent), os.W_OK | os.X_OK)
    is_set = False
    with contextlib.suppress(OSError):
        is_set = path.stat().st_size > 0
    return SecretView(file=str(path), is_set=is_set, writable=writable, note=note)


# ---- versions


def _python() -> Iterator[Part]:
    for name in ("trainer", *_PACKAGES):
        found = importlib.metadata.metadata(name)
        classes = [one for one in found.get_all("Classifier", []) if one.startswith("License ::")]
        licence = "".join(classes[:1]).rpartition(" :: ")[2]
        if "License-Expression" in found:
            licence = found["License-Expression"]
        yield Part(name=name, version=found["Version"], licence=licence, text="")


def _vendored() -> Iterator[Part]:
    """The packages of the VENDOR file, each with the licence that lies beside it."""
    lines = [
        line.split() for line in (VENDOR / "VENDOR").read_text().splitlines() if line[:1] not in ("", "#")
    ]
    for place, words in enumerate(lines):
        if words[0] == "package":
            files = (other[1] for other in lines[place + 1 :] if other[0] == "file")
            text = next((name for name in files if name.endswith("LICENSE.txt")), "")
            yield Part(name=words[1], version=words[2], licence=words[3], text=text)
