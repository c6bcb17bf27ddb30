"""FLUX.1-Kontext-dev: the components of FLUX.1-dev behind another pipeline."""

from __future__ import annotations

from tests.random_bases import flux1_dev

BASE = flux1_dev.BASE
