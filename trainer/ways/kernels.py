"""Attention kernels: what other floors must know of them."""

from __future__ import annotations

ROW_KERNELS = ("flash",)
"""Those that read on the device where the samples of a packed row end."""
