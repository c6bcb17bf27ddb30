"""Tiny and full-size random bases: one module a family."""

from __future__ import annotations

import importlib

from scripts.random_bases.common import Base

FAMILIES = ("flux1_dev", "flux1_kontext", "flux2_dev", "kandinsky5", "llama", "qwen_image", "qwen_image_edit")


def get(family: str) -> Base:
    """The entry of a family."""
    base: Base = vars(importlib.import_module(f"scripts.random_bases.{family}"))["BASE"]
    return base
