"""Fixtures of all tests."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from bench.processes import visible
from tests.e2e.nursery import Nursery
from tests.programs import program
from tests.ranks import Workers, workers
from trainer.modeling.vision import make_torchvision_importable


def take_turns(worker: str, gpus: list[str]) -> str:
    """CUDA_VISIBLE_DEVICES of a worker of pytest-xdist ("gw3"): all GPUs, and another one first for each."""
    first = int(worker.removeprefix("gw")) % len(gpus)
    return ",".join(gpus[first:] + gpus[:first])


# `make test-gpu` asks for it
if "GPU_TURNS" in os.environ and "PYTEST_XDIST_WORKER" in os.environ and (found := visible()) != [""]:
    os.environ["CUDA_VISIBLE_DEVICES"] = take_turns(os.environ["PYTEST_XDIST_WORKER"], found)
    # each worker's compiler would start as many processes as there are cores
    own = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, own)))

# how long an example takes depends on what else the machine does
settings.register_profile(
    "any-machine", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")

gc.disable()  # importing makes millions of objects and hardly any garbage: on again before the first test
make_torchvision_importable()  # before any test module imports diffusers


@functools.cache
def freeze_libraries(hundreds: int) -> None:
    """Keep what was imported out of every later collection of garbage; once for each so many hundred modules.

    A run collects several times, and would go through more than a million objects of libraries each time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


_ALIKE = ("flux1_kontext", "flux2_dev", "qwen_image-", "kandinsky5", "mistral", "qwen2", "qwen3")
"""Families beside one a kind (flux1_dev, qwen_image_edit, llama), by the beginnings of their tests' names."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests that take longest to the front: no worker waits at the end for a long test of another.

    Slow ones of a family that another one stands for are marked, for .ci/run on a slow machine.
    """
    longest = ("tests/e2e/", "tests/unit/bench/", "tests/unit/scripts/")
    items.sort(key=lambda item: not item.nodeid.startswith(longest))
    for item in items:
        if item.get_closest_marker("slow") and any(f"[{name}" in item.nodeid for name in _ALIKE):
            item.add_marker("alike")


def pytest_runtest_setup() -> None:
    freeze_libraries(len(sys.modules) // 100)


HANDLERS = {
    signum: signal.getsignal(signum)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
}
"""Handlers of the signals that a run takes."""


@pytest.fixture(autouse=True)
def signals_put_back() -> Iterator[None]:
    """Handlers as they were, after a test with a run's own. What is ignored would be so in later children."""
    yield
    for signum, handler in HANDLERS.items():
        signal.signal(signum, handler)


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Writes without waiting for the disk: nothing here must outlive the machine, and some disks are slow."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a family's tiny base model, built once a session. Read only: copy it to change it."""
    from tests.tiny import build_tiny

    built: dict[str, Path] = {}

    def base(family: str) -> Path:
        if family not in built:
            built[family] = build_tiny(family, tmp_path_factory.mktemp("tiny") / family)
        return built[family]

    return base


@pytest.fixture(scope="session")
def tiny_flux1_dev(tiny_base: Callable[[str], Path]) -> Path:
    """Folder of the tiny FLUX.1-dev base. Read only."""
    return tiny_base("flux1_dev")


@pytest.fixture(scope="session")
def pool() -> Iterator[Workers]:
    """Processes that meet as ranks, kept from test to test: they start slowly."""
    with workers() as made:
        yield made


@pytest.fixture(scope="session")
def warm() -> Iterator[Nursery]:
    """A process that forks supervisors and their children, without torch."""
    made = Nursery(os.environ, "tests.warm")
    yield made
    made.end()


@pytest.fixture(scope="session")
def promtool(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of Prometheus' own judge of metrics, configuration and rules."""
    return program("promtool", package="prometheus", folder=tmp_path_factory.mktemp("promtool"))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real tracer and autograd, without the code generator, which needs a C++ compiler here."""
    import torch
    import torch._dynamo.utils

    compile_module = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_module)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # `compile_blocks` changes it
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield
    torch._dynamo.reset()
