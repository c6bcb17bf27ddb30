"""A repository of the hub on this disk, through huggingface_hub. Every failure says what would help.

Downloads land in huggingface_hub's own cache (HF_HOME) and resume where they stopped.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import environment
from trainer.errors import AccessError, NoSpaceError, TrainerError
from trainer.files.atomic import no_space_told
from trainer.words.sizes import GB

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

# the same weights once more, as the model's own code reads them
_OTHER_LAYOUT = ["*consolidated*.safetensors"]
KEY = "model.pretrained_model_name_or_path"
# the pattern of huggingface_hub.utils.validate_repo_id, and the layout of its cache: the modules that know
# them take longer to import than a plan takes to make
_REPOSITORY = re.compile(r"\b[\w\-.]{1,96}\b/\b[\w\-.]{1,96}\b", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class Download:
    """The sizes of a download, known before its first byte."""

    repository: str
    commit: str
    total_bytes: int
    """All files that the run needs."""
    missing_bytes: int
    """The part of them that is not on this disk yet."""
    free_bytes: int
    folder: Path
    """huggingface_hub's cache."""


def is_offline() -> bool:
    """True if HF_HUB_OFFLINE forbids asking the hub."""
    from huggingface_hub import constants

    return constants.is_offline_mode()


def is_repository_id(name: str) -> bool:
    """True if `name` can be a repository, OWNER/NAME. Anything else was meant as a path."""
    fits = _REPOSITORY.fullmatch(name) is not None and not name.endswith(".git")
    return fits and "--" not in name and ".." not in name


@contextlib.contextmanager
def refusal_told(folder: Path) -> Iterator[None]:
    """Turn what permissions refuse inside the block, at `folder` or below it, into AccessError."""
    try:
        yield
    except PermissionError as error:
        raise AccessError(
            f"this user may not read {error.filename or folder}",
            where=str(folder),
            remedy="let this user enter and read the folder (chmod -R u+rX, chown), or name one that it may",
        ) from error


def cached(repository: str, revision: str | None) -> Path | None:
    """The repository's folder on this disk, without network, as far as it is here; None where it is not.

    Raises AccessError where this user may not enter it.
    """
    from huggingface_hub import constants

    parts = ("models", *repository.split("/"))
    cache = environment.at_home(constants.HF_HUB_CACHE, "HF_HOME").resolve()
    folder, commit = cache / constants.REPO_ID_SEPARATOR.join(parts), revision or constants.DEFAULT_REVISION
    with refusal_told(cache):
        if not _COMMIT.fullmatch(commit):
            reference = folder / "refs" / commit
            commit = reference.read_text() if reference.exists() else ""
        snapshot = folder / "snapshots" / commit
        return snapshot if commit and snapshot.exists() else None


def download(
    repository: str,
    revision: str | None,
    patterns: Sequence[str],
    *,
    on_start: Callable[[Download], None] | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
    key: str = KEY,
) -> Path:
    """Download the files that match `patterns` and return their folder, whose name is the commit.

    `key` is where the repository is named, for messages.
    `on_start` hears the sizes first; `on_bytes(done, total)` runs as bytes arrive, in any thread but never in
    two at once, and may raise to stop. Raises AccessError (gated, not found, no network) and NoSpaceError
    (before any byte when the disk is too small).
    """
    import httpx2
    from huggingface_hub import constants, snapshot_download

    cache = Path(constants.HF_HUB_CACHE)
    try:
        wanted = functools.partial(
            snapshot_download,
            repository,
            revision=revision,
            cache_dir=cache,
            allow_patterns=list(patterns),
            ignore_patterns=_OTHER_LAYOUT,
        )
        files: Any = wanted(tqdm_class=_bar_class(0, None), dry_run=True)
        plan = _measured(repository, files, cache)
        if on_start is not None:
            on_start(plan)
        if plan.missing_bytes > plan.free_bytes:
            raise NoSpaceError(
                f"{repository} needs {plan.missing_bytes / GB:.1f} GB more, "
                f"{plan.free_bytes / GB:.1f} GB are free",
                where=str(cache),
                remedy="free space there, or set HF_HOME to a folder on a larger disk",
            )
        with no_space_told(cache):
            return Path(wanted(tqdm_class=_bar_class(plan.missing_bytes, on_bytes)))
    # raised by httpx2 and huggingface_hub for the network, the server and the cache folder
    except (httpx2.HTTPError, OSError) as error:
        raise _told(repository, revision, error, key) from error


def _measured(repository: str, files: Sequence[DryRunFileInfo], cache: Path) -> Download:
    """The sizes of a download by what the hub says of its files."""
    from huggingface_hub.file_download import repo_folder_name

    missing = sum(file.file_size or 0 for file in files if file.will_download)
    # huggingface_hub continues downloads that were interrupted
    blobs = cache / repo_folder_name(repo_id=repository, repo_type="model") / "blobs"
    missing -= sum(path.stat().st_size for path in blobs.glob("*.incomplete"))
    existing = next(parent for parent in (cache.absolute(), *cache.absolute().parents) if parent.exists())
    return Download(
        repository=repository,
        commit=files[0].commit_hash if files else "",
        total_bytes=sum(file.file_size or 0 for file in files),
        missing_bytes=max(0, missing),
        free_bytes=shutil.disk_usage(existing).free,
        folder=cache,
    )


def _told(repository: str, revision: str | None, error: Exception, key: str) -> TrainerError:
    """The error with its exit code and what helps against it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        DryRunError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    # huggingface_hub wraps what stopped it from listing the files
    cause = error.__cause__ if isinstance(error, DryRunError) and error.__cause__ is not None else error
    page = f"{constants.ENDPOINT}/{repository}"
    token = f"write an access token into {environment.read('HF_TOKEN_PATH') or constants.HF_TOKEN_PATH}"
    token += " (HF_TOKEN_PATH names another file)"
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else None
    if isinstance(cause, GatedRepoError) or status == 403:
        what = f"{repository} is given only to those who accepted its licence"
        return AccessError(what, where=key, remedy=f"accept the licence on {page}, then {token}")
    if isinstance(cause, RevisionNotFoundError):
        what = f"{repository} has no revision {revision!r}"
        return AccessError(what, where="model.revision", remedy=f"branches and tags are listed on {page}")
    if isinstance(cause, RepositoryNotFoundError) or status == 401:
        what = f"{repository} is no folder here, and the hub does not show such a repository"
        remedy = f"check the name on {page}; if it is private or asks for a licence, {token}"
        return AccessError(what, where=key, remedy=remedy)
    if status is not None:
        remedy = "the fault is on the hub's side: try again later; what was downloaded is kept"
        return AccessError(f"the hub answered {status} for {repository}", where=key, remedy=remedy)
    return AccessError(
        f"{repository} could not be downloaded ({type(cause).__name__}: {cause})",
        where=key,
        remedy="check network and proxy, then try again: what was downloaded is kept; without network, copy"
        " the model to this machine and name its folder",
    )


def _bar_class(total_bytes: int, on_bytes: Callable[[int, int], None] | None) -> type[Any]:
    """A tqdm that shows nothing and reports bytes: the only way in that snapshot_download offers."""
    from tqdm import tqdm

    lock = threading.Lock()
    byte_bars: list[Any] = []

    class Reporter(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"file": _Nowhere(), "disable": False})
            if kwargs.get("unit") == "B":
                byte_bars.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if on_bytes is not None and self in byte_bars:
                with lock:
                    # one bar counts bytes from the network, the other bytes on disk
                    done = int(max(bar.n for bar in byte_bars))
                    on_bytes(min(done, total_bytes), total_bytes)
            return shown

    return Reporter


class _Nowhere(io.TextIOBase):
    """A text file that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)
