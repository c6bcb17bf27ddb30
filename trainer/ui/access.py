"""The studio's token and the sessions that it opens: who may ask for a page."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ConfigError, StorageError
from trainer.files import atomic

TOKEN_FILE = "token"
_SESSIONS_FILE = "sessions.json"
_TOKEN_BYTES = 32
SESSION_SECONDS = 30 * 24 * 3600
FREE_TRIES = 5
"""Wrong tokens in a row that are answered at once; each one after them doubles the wait."""
_LONGEST_WAIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Session:
    """One browser that showed the token."""

    key: str
    """SHA-256 of its cookie, by which it is kept: the file of sessions opens none."""
    csrf: str
    """64 hex digits that a change must bring, in a header or as the first field of its form."""


class TooManyTriesError(Exception):
    """A token came before the wait after wrong ones was over; `seconds` are left of it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"{seconds:.0f} s are left")
        self.seconds = seconds


class Access:
    """The token of a studio's folder, its sessions, and the wait after wrong tokens. Safe in threads.

    Opening it makes the folder and a token of 256 bits where there is none; `made` tells that it did. Raises
    ConfigError where the folder cannot be made or is another user's, others may read the token, or it is
    damaged.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        try:
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        except OSError as error:
            remedy = "name folders that this user can write: --runs, or --folder for the studio's own"
            raise ConfigError(
                f"cannot make the studio's folder: {error}", where=str(folder), remedy=remedy
            ) from error
        self._folder, self._clock, self._lock = folder, clock, threading.Lock()
        self._wrong, self._next_try = 0, 0.0
        try:
            self.made = not (folder / TOKEN_FILE).exists()
            self.token = _new_token(folder / TOKEN_FILE) if self.made else _read_token(folder)
            if self.made:  # no token opened them: they would come back at the next start
                (folder / _SESSIONS_FILE).unlink(missing_ok=True)
            self._sessions = self._read_sessions()
        except PermissionError as error:
            what = "this user may not use the studio's folder"
            remedy = "start as the user who owns it (compose: `export UID` first), or name another: --folder"
            raise ConfigError(what, where=str(folder), remedy=remedy) from error

    @property
    def cookie_name(self) -> str:
        """Name of the session's cookie: browsers send a host's cookies to all its ports, and two studios
        must not end each other's sessions.
        """
        return f"studio_{_digest(self.token)[:12]}"

    def log_in(self, given: str) -> str | None:
        """The cookie of a new session; None for a wrong token. Raises TooManyTriesError.

        After FREE_TRIES wrong ones each further one doubles a wait in which none is looked at.
        """
        with self._lock:
            now = self._clock()
            if now < self._next_try <= now + _LONGEST_WAIT_SECONDS:  # else the clock was set back
                raise TooManyTriesError(self._next_try - now)
            if not hmac.compare_digest(given.encode(errors="replace"), self.token.encode()):
                self._wrong += 1
                if self._wrong >= FREE_TRIES:
                    wait = min(2.0 ** (self._wrong - FREE_TRIES + 1), _LONGEST_WAIT_SECONDS)
                    self._next_try = now + wait
                return None
            self._wrong, self._next_try = 0, 0.0
            return self._begun()

    def _begun(self) -> str:
        """The cookie of a new session; the caller has the lock."""
        cookie = secrets.token_hex(_TOKEN_BYTES)
        self._sessions[_digest(cookie)] = self._clock() + SESSION_SECONDS
        self._write_sessions()
        return cookie

    def session(self, cookie: str) -> Session | None:
        """The session of a cookie; None where it has ended or never was."""
        key = _digest(cookie)
        if not self.is_open(key):
            return None
        csrf = hmac.new(cookie.encode(), b"csrf", hashlib.sha256).hexdigest()
        return Session(key=key, csrf=csrf)

    def is_open(self, key: str) -> bool:
        """True for the key of a session that has not ended."""
        return self._sessions.get(key, 0.0) >= self._clock()

    def log_out(self, key: str) -> None:
        """End the session of that key."""
        with self._lock:
            self._sessions.pop(key, None)
            self._write_sessions()

    def rotate(self) -> str:
        """Replace the token and end every session; gives the cookie of a new one, which no wait holds up:
        who asks is in. Raises StorageError, and the old token and its sessions stay.
        """
        with self._lock:
            beside = self._folder / f"{TOKEN_FILE}.new"
            beside.unlink(missing_ok=True)
            token = _new_token(beside)
            beside.replace(self._folder / TOKEN_FILE)
            self.token, self._sessions = token, {}
            return self._begun()

    @property
    def sessions(self) -> list[tuple[str, float]]:
        """Key and end, in Unix seconds, of each session that has not ended, newest first."""
        kept = ((key, end) for key, end in list(self._sessions.items()) if end >= self._clock())
        return sorted(kept, key=lambda one: -one[1])

    def _read_sessions(self) -> dict[str, float]:
        try:
            raw = json.loads((self._folder / _SESSIONS_FILE).read_text())
        except (FileNotFoundError, ValueError):
            return {}  # every browser shows the token again
        kept = raw.items() if isinstance(raw, dict) else ()
        return {key: end for key, end in kept if isinstance(end, int | float) and end > self._clock()}

    def _write_sessions(self) -> None:
        now = self._clock()
        self._sessions = {key: end for key, end in self._sessions.items() if end > now}
        path = self._folder / _SESSIONS_FILE
        try:
            atomic.write_text(path, json.dumps(self._sessions))
        except StorageError:  # on a full disk they end with the studio, and those that ended do not come back
            with contextlib.suppress(OSError):
                path.unlink()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _new_token(path: Path) -> str:
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    with atomic.no_space_told(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(token + "\n")
    return token


def _read_token(folder: Path) -> str:
    path = folder / TOKEN_FILE
    remedy = f"remove {path}, and start again: a new token is made"
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077:
        raise ConfigError("others may read the studio's token", where=str(path), remedy=remedy)
    token = path.read_text(errors="replace").strip()
    if len(token) < len(secrets.token_urlsafe(_TOKEN_BYTES)):
        raise ConfigError("the studio's token is damaged", where=str(path), remedy=remedy)
    return token
