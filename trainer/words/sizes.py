"""Sizes in bytes, as text and from text."""

from __future__ import annotations

import re

GB = 10**9
GIB = 1024**3
_UNITS = {"gib": GIB, "gb": GB, "mib": 1024**2, "mb": 10**6}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)", re.IGNORECASE)


def gib(count: float) -> str:
    """Bytes as GiB with one digit; small sizes as MiB."""
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{count / 1024**2:.1f} MiB"


def size_bytes(text: str) -> int:
    """Bytes of a size such as "24GiB" (24 * 1024^3) or "24 GB" (24 * 10^9); ValueError for another text."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) == 0:
        raise ValueError(f"{text!r} is no size such as 24GiB or 24 GB")
    return int(float(found[1]) * _UNITS[found[2].lower()])
