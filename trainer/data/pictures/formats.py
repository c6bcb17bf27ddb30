"""Picture formats that are read. A plan lists folders by them without importing image libraries."""

from __future__ import annotations

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif")
FORMATS_TEXT = "png, jpg, jpeg, webp, bmp, tif, tiff and avif are read"
