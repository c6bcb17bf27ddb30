"""The table of variables and what is read through it."""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from trainer.config import environment
from trainer.config.schema import RunConfig
from trainer.errors import ConfigError


def run_config(cache_dir: str | None = None) -> RunConfig:
    data = {"sets": [{"img_dir": "/a"}], "cache_dir": cache_dir}
    model = {"pretrained_model_name_or_path": "m"}
    return RunConfig.model_validate({"family": "f", "model": model, "data": data, "output_dir": "/out"})


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        (environment.user_cache_dir, "TRAINER_CACHE_DIR"),
        (environment.hub_cache_dir, "HF_HOME"),
        (environment.queue_dir, "TRAINER_QUEUE_DIR"),
    ],
)
def test_a_user_without_a_home_folder(
    folder: Callable[[], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HOME", "HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", *environment._PATHS):
        monkeypatch.delenv(variable, raising=False)

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match="has no home folder, and HOME is not set") as told:
        folder()
    assert told.value.problems[0].where == name
    assert told.value.problems[0].remedy == (
        f"set HOME to a folder that this user can write, or {name} to a path from /"
    )


def test_a_folder_at_the_home_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_RUNTIME_DIR", "~no-such-user/x")
    with pytest.raises(ConfigError, match="there is no such user"):
        environment.make_runtime_dir()


def test_only_listed_names_are_read() -> None:
    with pytest.raises(AssertionError, match="TRAINER_NONSENSE"):
        environment.read("TRAINER_NONSENSE")


def test_names_are_unique_and_explained() -> None:
    names = [variable.name for variable in environment.VARIABLES]
    assert len(names) == len(set(names))
    assert all(variable.meaning for variable in environment.VARIABLES)


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_PROFILE", "")
    assert environment.read("TRAINER_PROFILE") is None
    monkeypatch.setenv("TRAINER_PROFILE", "cpu")
    assert environment.read("TRAINER_PROFILE") == "cpu"
    assert environment.read("TRAINER_PROFILE", {}) is None


def test_runtime_dir_is_one_per_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINER_RUNTIME_DIR", raising=False)
    assert environment.runtime_dir() == Path(tempfile.gettempdir()) / f"trainer-{os.getuid()}"
    monkeypatch.setenv("TRAINER_RUNTIME_DIR", "/run/trainer")
    assert environment.runtime_dir() == Path("/run/trainer")


def test_cache_dir_goes_by_config_then_variable_then_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert environment.cache_dir(run_config()) == Path("/home/me/.cache/trainer")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert environment.cache_dir(run_config()) == Path("/xdg/trainer")
    monkeypatch.setenv("TRAINER_CACHE_DIR", "/cache")
    assert environment.cache_dir(run_config()) == Path("/cache")
    assert environment.cache_dir(run_config("/own")) == Path("/own")


@pytest.mark.parametrize(
    ("value", "port"),
    [("", 9464), ("0", None), ("9000", 9000), ("tcp://10.0.0.1:9464", 9464)],  # the last is Kubernetes'
)
def test_metrics_port(monkeypatch: pytest.MonkeyPatch, value: str, port: int | None) -> None:
    monkeypatch.setenv("TRAINER_METRICS_PORT", value)
    assert environment.metrics_port() == port


@pytest.mark.parametrize("value", ["http", "-1", "65536", "9464/tcp", "٣"])
def test_metrics_port_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TRAINER_METRICS_PORT", value)
    with pytest.raises(ConfigError, match="TRAINER_METRICS_PORT"):
        environment.metrics_port()


def test_make_runtime_dir_makes_one_that_only_its_user_enters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TRAINER_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    folder = environment.make_runtime_dir()
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700
    assert environment.make_runtime_dir() == folder


def test_a_default_runtime_dir_of_somebody_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TRAINER_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    link = environment.runtime_dir()
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="TRAINER_RUNTIME_DIR"):
        environment.make_runtime_dir()
    link.unlink()
    link.mkdir()
    uid = os.getuid()
    monkeypatch.setattr(environment, "runtime_dir", lambda: link)
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match="another user"):
        environment.make_runtime_dir()


@pytest.mark.parametrize("value", ["file", "file/below", "/proc", "/proc/nothing"])
def test_a_runtime_dir_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRAINER_RUNTIME_DIR", str(tmp_path / value))
    with pytest.raises(ConfigError, match=r"TRAINER_RUNTIME_DIR: .* cannot be used"):
        environment.make_runtime_dir()
