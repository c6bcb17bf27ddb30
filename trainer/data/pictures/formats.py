"""Formats of pictures that are read. A plan lists folders by them without loading what opens pictures."""

from __future__ import annotations

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif")
FORMATS_TEXT = "png, jpg, jpeg, webp, bmp, tif, tiff and avif are read"
