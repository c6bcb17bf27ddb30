"""A hub that answers from a folder, and an empty cache for what it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from tests.unit.modeling.fake_hub import FakeHub
from trainer.config.schema import RunConfig


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """huggingface_hub's cache, empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def fake_hub(tiny_flux1_dev: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The tiny base as a repository; nothing reaches the network."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # huggingface_hub sleeps between its own attempts
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub = FakeHub(tiny_flux1_dev)
    set_client_factory(hub.client)
    yield hub
    set_client_factory(default_client_factory)


@pytest.fixture
def run_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """A configuration whose `model` section is given."""

    def make(**model: object) -> RunConfig:
        return RunConfig.model_validate(
            {
                "family": "flux1_dev",
                "model": model,
                "data": {"sets": [{"img_dir": tmp_path / "images"}]},
                "output_dir": tmp_path / "run",
            }
        )

    return make
