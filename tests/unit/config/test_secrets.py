"""Tokens, keys and credentials in addresses are in nothing that is printed or written."""

from __future__ import annotations

import io
import json
import logging
import os
from pathlib import Path

import pytest
import yaml

from trainer.cli import main
from trainer.config.secrets import HIDDEN, redacted
from trainer.telemetry import log, status
from trainer.telemetry.sinks.metrics import RunMetrics
from trainer.telemetry.status import Phase, StatusWriter

SECRETS = {
    "HF_TOKEN": "hf_qwertyuiopasdfghjklz",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "MY_SERVICE_TOKEN": "token-of-a-service",
    "AWS_SECRET_ACCESS_KEY": 'a"key\\with-signs',
    "DB_PASSWORD": "correct horse battery",
}
ADDRESS = "https://someone:pa55word@proxy.example:8080/simple"


@pytest.fixture
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


def test_a_pipe_that_a_variable_names_is_neither_waited_for_nor_consumed(tmp_path: Path) -> None:
    pipe = tmp_path / "token"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(descriptor, b"a-secret-of-somebody")
        assert redacted("text", {"HF_TOKEN_FILE": str(pipe)}) == "text"
        assert os.read(descriptor, 100) == b"a-secret-of-somebody"
    finally:
        os.close(descriptor)


def leaked(text: str) -> list[str]:
    """Names of the secrets that are in a text, as they are or as JSON writes them."""
    found = [name for name, value in SECRETS.items() if value in text or json.dumps(value)[1:-1] in text]
    return found + (["address"] if "pa55word" in text else [])


EVERYTHING = " ".join([*SECRETS.values(), ADDRESS])


def test_every_kind_is_hidden() -> None:
    assert leaked(EVERYTHING) == [*SECRETS, "address"]
    text = redacted(EVERYTHING, SECRETS)
    assert not leaked(text)
    assert text.endswith(f"https://{HIDDEN}@proxy.example:8080/simple")
    assert redacted("http://me:p@ss@proxy/a@b", {}) == f"http://{HIDDEN}@proxy/a@b"
    assert not leaked(redacted(json.dumps({"all": EVERYTHING}), SECRETS))


@pytest.mark.parametrize("name", ["WANDB_API_KEY_FILE", "HF_TOKEN_FILE", "HF_TOKEN_PATH"])
def test_a_secret_that_lies_in_a_file_is_hidden(tmp_path: Path, name: str) -> None:
    """No variable holds such a secret, but the library that reads it may repeat it in an error."""
    file = tmp_path / "key"
    file.write_text(SECRETS["WANDB_API_KEY"] + "\n")
    said = f"wandb: ERROR the key {SECRETS['WANDB_API_KEY']} from {file} is not accepted"
    assert redacted(said, {name: str(file)}) == f"wandb: ERROR the key {HIDDEN} from {file} is not accepted"
    assert redacted("nothing to hide", {name: str(tmp_path / "missing")}) == "nothing to hide"
    assert redacted("nothing to hide", {name: str(tmp_path)}) == "nothing to hide"


@pytest.mark.parametrize(
    "text", ["hf_AbCdEfGhIjKlMnOpQrStUvWx", "sk-abcdefghijklmnopqrstuvwx", "ghp_abcdefghijklmnopqrstuv12"]
)
def test_tokens_of_a_known_form_need_no_variable(text: str) -> None:
    assert redacted(f"with {text}.", {}) == f"with {HIDDEN}."


@pytest.mark.parametrize("value", ["it's-a-secret", 'with "quotes" and \\', "grün geheim", "tab\tand more"])
def test_a_secret_is_hidden_however_yaml_writes_it(value: str) -> None:
    for style in (None, "'", '"'):
        text = yaml.safe_dump({"word": value}, default_style=style, allow_unicode=True)
        hidden = redacted(text, {"MY_SECRET": value})
        assert HIDDEN in hidden, text
        assert yaml.safe_load(hidden) == {"word": HIDDEN}


def test_an_address_that_was_taken_for_a_path_is_hidden() -> None:
    path = Path("https://me:password@host/x")
    assert str(path) == "https:/me:password@host/x"
    assert redacted(f"{path}: no", {}) == f"https:/{HIDDEN}@host/x: no"
    assert redacted("data:/me@home c:/x@y a/b@c", {}) == "data:/me@home c:/x@y a/b@c"


def test_harmless_texts_stay() -> None:
    environ = {
        "HF_TOKEN_PATH": "/run/secrets/hf",
        "SHORT_KEY": "1",
        "EMPTY_TOKEN": "",
        "KEYBOARD": "querty-us",
    }
    text = "step 1/10 of /run/secrets/hf on querty-us, https://example.org/a@b, user@host hf_hub, skip 1"
    assert redacted(text, environ) == text


@pytest.mark.usefixtures("_secrets")
def test_dumps_plans_and_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    facts = Path(__file__).resolve().parents[2] / "golden" / "machines" / "h200.json"
    prompts = json.dumps([*SECRETS.values(), ADDRESS])
    (tmp_path / "c.yaml").write_text(
        "family: flux1_dev\ndata: {sets: [{img_dir: x}]}\noutput_dir: out\n"
        f"validation:\n  prompts: {prompts}\n"
    )
    commands = (
        ["config", "show", "c.yaml"],
        ["config", "check", "c.yaml"],
        ["config", "variables"],
        ["plan", "c.yaml", "--facts", str(facts)],
        ["plan", "c.yaml", "--facts", str(facts), "--json"],
    )
    for command in commands:
        assert main(command) == 0
        printed = capsys.readouterr()
        assert printed.out and not leaked(printed.out + printed.err), command
    for value in (*SECRETS.values(), ADDRESS):
        assert main(["config", "check", "c.yaml", "--set", f"train.seed={value}"]) == 78
        printed = capsys.readouterr()
        assert HIDDEN in printed.err and not leaked(printed.out + printed.err), value
    assert main(["config", "show", "c.yaml"]) == 0
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    assert main(["config", "check", "again.yaml"]) == 0


@pytest.mark.usefixtures("_secrets")
def test_logs_status_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = io.StringIO()
    monkeypatch.setattr("sys.stderr", seen)
    log.setup(tmp_path)
    try:
        try:
            raise ValueError(EVERYTHING)
        except ValueError:
            logging.getLogger("trainer.test").exception(
                "failed with %s", EVERYTHING, extra={"fields": {"what": EVERYTHING}}
            )
    finally:
        for handler in list(logging.getLogger("trainer").handlers):
            logging.getLogger("trainer").removeHandler(handler)
            handler.close()
    row = json.loads((tmp_path / "log.jsonl").read_text())
    assert HIDDEN in row["message"] and HIDDEN in row["what"] and HIDDEN in row["traceback"]
    StatusWriter(tmp_path).beat(Phase.TRAIN)
    status.write_end(tmp_path, exit_code=71, cause=EVERYTHING)
    assert HIDDEN in (tmp_path / status.STATUS_FILE).read_text()
    metrics = RunMetrics(tmp_path)
    build = {"version": "1", "torch": "2", "family": "tiny", "method": "lora"}
    metrics.begin(build=build, decisions={"attention": EVERYTHING}, budget_bytes=1)
    texts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert sum(HIDDEN in text for text in texts.values()) == 3, texts
    assert not [name for name, text in {**texts, "stderr": seen.getvalue()}.items() if leaked(text)]
