"""The hub at its HTTP boundary: huggingface_hub runs as it is, its requests are answered from a folder."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from huggingface_hub.utils._http import hf_request_event_hook

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOSITORY = "owner/model"


@dataclass
class FakeHub:
    """Serves `folder` as REPOSITORY at COMMIT; `refuse` answers every file with (status, error code)."""

    folder: Path
    refuse: tuple[int, str] | None = None
    refuse_listing: tuple[int, str] | None = None
    network_error: type[httpx2.TransportError] | None = None
    cut_after: int | None = None
    """Bytes of weight files after which the connection breaks."""
    requests: list[tuple[str, str]] = field(default_factory=list)

    def client(self) -> httpx2.Client:
        return httpx2.Client(
            transport=httpx2.MockTransport(self.answer), event_hooks={"request": [hf_request_event_hook]}
        )

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append((request.method, request.url.path))
        if self.network_error is not None:
            raise self.network_error("no route to host", request=request)
        path = request.url.path
        if path.startswith(f"/api/models/{REPOSITORY}"):
            if self.refuse_listing is not None:
                return refusal(request, *self.refuse_listing)
            if path.endswith("/revision/main") or path.endswith(REPOSITORY):
                return httpx2.Response(
                    200, json={"id": REPOSITORY, "sha": COMMIT, "siblings": []}, request=request
                )
            if "/tree/" in path:
                return httpx2.Response(200, json=[self.row(file) for file in self.files()], request=request)
            return refusal(request, 404, "RevisionNotFound")
        found = re.fullmatch(rf"/{REPOSITORY}/resolve/{COMMIT}/(.+)", path)
        if found is None:
            return refusal(request, 404, "RepoNotFound")
        if self.refuse is not None:
            return refusal(request, *self.refuse)
        return self.file(request, self.folder / found[1])

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def row(self, file: Path) -> dict[str, object]:
        size = file.stat().st_size
        return {
            "type": "file",
            "path": file.relative_to(self.folder).as_posix(),
            "size": size,
            "oid": etag(file),
        }

    def file(self, request: httpx2.Request, file: Path) -> httpx2.Response:
        content = file.read_bytes()
        found = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        start = int(found[1]) if found else 0
        headers = {
            "ETag": f'"{etag(file)}"',
            "X-Repo-Commit": COMMIT,
            "Content-Length": str(len(content) - start),
            "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}",
        }
        status = 206 if found else 200
        if request.method == "HEAD":
            return httpx2.Response(200, headers=headers, request=request)
        stream = Body(content[start:], self.cut_after if file.suffix == ".safetensors" else None)
        return httpx2.Response(status, headers=headers, stream=stream, request=request)


class Body(httpx2.SyncByteStream):
    """A file's bytes in pieces; the connection breaks after `cut_after` of them."""

    def __init__(self, content: bytes, cut_after: int | None) -> None:
        self.content, self.cut_after = content, cut_after

    def __iter__(self) -> Iterator[bytes]:
        end = len(self.content) if self.cut_after is None else self.cut_after
        for start in range(0, end, 65536):
            yield self.content[start : min(start + 65536, end)]
        if end < len(self.content):
            raise httpx2.ReadError("connection reset")


def refusal(request: httpx2.Request, status: int, code: str) -> httpx2.Response:
    headers = {"X-Error-Code": code, "X-Error-Message": f"refused: {code}"}
    return httpx2.Response(status, headers=headers, request=request)


def etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
