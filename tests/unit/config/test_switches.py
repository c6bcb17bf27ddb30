"""Variables that are true or false, and the table of all variables as people read it."""

from __future__ import annotations

import pytest

from trainer.cli import main
from trainer.cli.config import variables_markdown
from trainer.config import environment
from trainer.container.appliance import IMAGE_ENVIRONMENT, SECRETS
from trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "means"),
    [("true", True), ("TRUE", True), ("1", True), ("False", False), ("0", False), ("", None), (None, None)],
)
def test_switches(value: str | None, means: bool | None) -> None:
    environ = {} if value is None else {"UNIFIED_MEMORY": value}
    assert environment.switch("UNIFIED_MEMORY", environ) is means


@pytest.mark.parametrize("value", ["yes", "on", "2", "tru", "auto", "none"])
def test_other_words_are_no_switch(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        environment.switch("DISABLE_CPU_OFFLOAD", {"DISABLE_CPU_OFFLOAD": value})
    assert str(caught.value) == (
        f'DISABLE_CPU_OFFLOAD: "{value}" is neither true nor false\n    -> write true or false'
    )


def test_what_images_set_and_secrets_are_in_the_table() -> None:
    names = {variable.name for variable in environment.VARIABLES}
    assert set(IMAGE_ENVIRONMENT) <= names
    assert {name for secret in SECRETS for name in (secret, f"{secret}_FILE")} <= names


def test_the_hubs_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    found = []
    for name, value in (
        ("HOME", "/home/me"),
        ("XDG_CACHE_HOME", "/x"),
        ("HF_HOME", "/h"),
        ("HF_HUB_CACHE", "/c"),
    ):
        monkeypatch.setenv(name, value)
        found.append(str(environment.hub_cache_dir()))
    assert found == ["/home/me/.cache/huggingface/hub", "/x/huggingface/hub", "/h/hub", "/c"]


def test_every_variable_has_a_row() -> None:
    rows = variables_markdown().splitlines()
    assert rows[0] == "| variable | unset means | in the images | meaning |"
    assert [row.split("`")[1] for row in rows[2:]] == [
        *(variable.name for variable in environment.VARIABLES),
        "TRAINER__SECTION__KEY",
    ]
    assert any(row.startswith("| `HF_HOME` | `$XDG_CACHE_HOME/huggingface` | `/models` |") for row in rows)


def test_the_command_shows_values_but_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TRAINER_PROFILE", "cpu")
    assert main(["config", "variables"]) == 0
    text = capsys.readouterr().out
    assert "TRAINER_PROFILE  = cpu\n" in text and "HF_TOKEN  set\n" in text
    assert "hf_secret" not in text
    assert main(["config", "variables", "--markdown"]) == 0
    assert capsys.readouterr().out == variables_markdown()
