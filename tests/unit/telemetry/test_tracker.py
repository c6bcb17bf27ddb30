"""Values that Weights & Biases is given. A fake stands in for the library, an extra of 100 MB."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.errors import ConfigError, ExitCode
from trainer.telemetry.sinks.records import StepRecord, ValidationRecord
from trainer.telemetry.sinks.tracker import Tracker, require_settings

RECORD = StepRecord(
    step=3, loss=1.5, learning_rate=1e-4, grad_norm=0.5, seconds_per_step=2.0, samples_per_second=0.5
)


class Fake:
    """The parts of wandb that are called, and what they were called with."""

    def __init__(self) -> None:
        self.errors = SimpleNamespace(Error=RuntimeError)
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.codes: list[int] = []
        self.refuses = False
        self.breaks: Exception | None = None
        self.ended = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be what `wandb` and its module of connections are."""
        mailbox = SimpleNamespace(MailboxClosedError=EOFError, HandleAbandonedError=LookupError)
        monkeypatch.setitem(sys.modules, "wandb", self)
        monkeypatch.setitem(sys.modules, "wandb.sdk.mailbox", mailbox)

    def teardown(self) -> None:
        self.ended += 1
        raise ConnectionResetError("Connection lost")

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def Image(self, path: str) -> str:
        return f"picture {path}"

    def init(self, **arguments: Any) -> Any:
        if self.refuses:
            raise RuntimeError("no key")
        self.started.append(arguments)
        return SimpleNamespace(log=self._log, finish=self._finish)

    def _log(self, values: dict[str, Any], *, step: int) -> None:
        if self.breaks is not None:
            raise self.breaks
        self.logged.append((values, step))

    def _finish(self, *, exit_code: int) -> None:
        self.codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    fake.install(monkeypatch)
    for name in ("WANDB_API_KEY", "WANDB_API_KEY_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return fake


def test_a_resumed_run_goes_on_under_the_same_id(wandb: Fake, tmp_path: Path) -> None:
    Tracker(tmp_path, "mine", {"family": "x"}, print).close(finished=False)
    Tracker(tmp_path, "mine", {"family": "x"}, print).close(finished=True)
    first, second = wandb.started
    assert first["id"] == second["id"] == (tmp_path / "wandb.id").read_text()
    assert first["resume"] == "allow"
    assert (first["project"], first["name"], first["config"]) == ("mine", tmp_path.name, {"family": "x"})
    assert wandb.codes == [1, 0]


def test_values_and_pictures_are_sent_with_their_step(wandb: Fake, tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, "mine", {}, print)
    tracker.record(ValidationRecord(step=0, validation_loss=2.0, validation_data="hash"))
    tracker.record(RECORD)
    tracker.image("previews", tmp_path / "a.png", step=3)
    assert wandb.logged[0] == ({"validation_loss": 2.0}, 0)
    values, step = wandb.logged[1]
    assert step == 3
    assert (values["loss"], values["learning_rate"], values["grad_norm"]) == (1.5, 1e-4, 0.5)
    assert "tokens_per_second" not in values
    assert wandb.logged[2] == ({"previews": f"picture {tmp_path / 'a.png'}"}, 3)


def test_nothing_of_the_machine_is_sent_and_the_key_comes_from_its_file(
    wandb: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    monkeypatch.setenv("WANDB_API_KEY_FILE", str(key))
    monkeypatch.setenv("WANDB_MODE", "offline")
    Tracker(tmp_path, "mine", {}, print)
    started = wandb.started[0]
    settings = started["settings"]
    assert started["mode"] == "offline"
    assert settings["api_key"] == "secret"
    assert 0 < settings["finish_timeout"] <= 60
    assert settings["x_disable_meta"] and settings["x_disable_stats"] and settings["disable_code"]
    assert settings["console"] == "off" and settings["disable_git"]
    monkeypatch.setenv("WANDB_API_KEY", "other")
    Tracker(tmp_path, "mine", {}, print)
    assert wandb.started[1]["settings"]["api_key"] == "other"


def test_a_refusal_and_a_key_that_cannot_be_read_are_bad_configuration(
    wandb: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb.refuses = True
    with pytest.raises(ConfigError, match=r"train\.report_to: wandb cannot start \(no key\)") as caught:
        Tracker(tmp_path, "mine", {}, print)
    assert caught.value.exit_code is ExitCode.BAD_CONFIG
    assert "WANDB_MODE=offline" in str(caught.value)
    monkeypatch.setenv("WANDB_API_KEY_FILE", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="WANDB_API_KEY_FILE"):
        Tracker(tmp_path, "mine", {}, print)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("Connection lost"),
        EOFError("closed"),
        RuntimeError("refused"),
        LookupError("code 3"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_tracker_that_is_lost_on_the_way_is_told_once_and_ends_nothing(
    wandb: Fake, tmp_path: Path, error: Exception
) -> None:
    """Its process was killed, say; its hook at the end of ours is taken away."""
    said: list[str] = []
    tracker = Tracker(tmp_path, "mine", {}, said.append)
    tracker.record(RECORD)
    wandb.breaks = error
    tracker.record(RECORD)
    tracker.image("previews", tmp_path / "a.png", step=3)
    tracker.close(finished=True)
    (line,) = said
    assert line.startswith(
        f"warning: Weights & Biases is sent nothing more ({type(error).__name__}: {error})"
    )
    assert (len(wandb.logged), wandb.codes, wandb.ended) == (1, [], 1)


def test_a_mode_and_a_key_that_are_none_are_told_before_anything_is_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offlin")
    with pytest.raises(ConfigError, match=r"WANDB_MODE: 'offlin' is no mode of wandb\n.*offline"):
        require_settings()
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    monkeypatch.setenv("WANDB_API_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(ConfigError, match=r"key cannot be read: it is no text\n.*holds the key alone"):
        require_settings()
