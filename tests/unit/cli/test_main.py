"""Commands: how they are found, their imports, and their exit codes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from trainer.cli import main
from trainer.cli.commands import COMMANDS
from trainer.cli.errors import error_text, run
from trainer.errors import DataError, ExitCode, Problem

REPOSITORY = Path(__file__).resolve().parents[3]
HEAVY = {"pydantic", "rich", "prometheus_client", "torch", "numpy", "diffusers", "transformers", "yaml"}


@pytest.mark.parametrize("arguments", [["--help"], ["health"], ["--version"]])
def test_cheap_commands_import_little(arguments: list[str], tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from trainer.cli import main\n"
        f"code = main({arguments!r})\n"
        "print(code, *sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    environment = {**os.environ, "TRAINER_RUNTIME_DIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env=environment,
        text=True,
        capture_output=True,
        check=True,
    )
    code, *modules = result.stdout.splitlines()[-1].split()
    assert code in ("0", "1")
    assert "click" in modules
    assert not HEAVY & set(modules)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_row_leads_to_a_command_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, attribute = COMMANDS[name].target.partition(":")
    command = vars(importlib.import_module(module))[attribute]
    assert isinstance(command, click.Command)
    assert main([name, "--help"]) == 0
    _, heading, examples = capsys.readouterr().out.partition("\n  Examples:\n    ")
    assert not examples.startswith(" ")
    assert heading and f"trainer {name}" in examples


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name: str) -> None:
    module, _, attribute = COMMANDS[name].target.partition(":")
    command = vars(importlib.import_module(module))[attribute]
    ways = command.commands.values() if isinstance(command, click.Group) else [command]
    options = [one for way in ways for one in way.params if isinstance(one, click.Option)]
    assert [one.opts for one in options if not one.help] == []


def test_help_names_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(row.summary in text for row in COMMANDS.values())
    assert all(f"  {code.value} " in text for code in ExitCode)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["confg"], "Did you mean 'config'?"),
        (["xyzzy"], "Commands: "),
        (["config", "check"], "Missing argument 'CONFIG...'"),
        (["config", "check", "a.yaml", "--sett", "a=b"], "--set"),
    ],
)
def test_a_command_line_that_cannot_be_understood(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 78
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("--dtype", "keys are set in the file, or by --set model.dtype=..."),
        ("--max_train_steps", "or by --set train.max_train_steps=..."),
        ("--max-train-steps", "or by --set train.max_train_steps=..."),
        ("--network_dim", "or by --set lora.rank=..."),
        ("--img_dir", "pass --dataset PATH, or write `img_dir` in a set of data.sets, in the file"),
        ("--chat-file", "pass --dataset PATH, or write `chat_file` in a set of data.sets, in the file"),
        ("--columns", "write `columns` in a set of data.sets, in the file"),
        ("--repeats", "write `repeats` in a set of data.sets, in the file"),
        ("--name", "or by --set output_dir=..."),
        ("--deepspeed", "there is none here, leave it out: GPUs share a step by parallel.gpus"),
        ("--config", "name the file without an option: trainer config check my.yaml"),
        ("--outptu", "did you mean --output?"),
        ("--xyzzy", "trainer config check --help lists the options"),
    ],
)
def test_options_of_other_trainers_are_told_what_they_are_here(
    option: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "check", "a.yaml", option, "1"]) == 78
    told = capsys.readouterr().err
    assert f"{option}: trainer config check has no such option\n    -> " in told
    assert remedy in told


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "a.yaml", "--output", ""],
        ["train", "a.yaml", "--dataset="],
        ["train", ""],
        ["preflight", "train", "a.yaml", "--output", ""],
        ["sample", "a.yaml", "--picture", ""],
        ["plan", "a.yaml", "--facts", ""],
        ["runs", "list", ""],
        ["health", "--runtime-dir", ""],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty path is refused like in a file: `--output "$UNSET"` must not mean the working directory."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 78
    captured = capsys.readouterr()
    assert ('expected a path, got ""' in captured.err) is (arguments[0] != "preflight")
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["probe"], ["probe", "--json"], ["verify-lora", "FILE"]])
@pytest.mark.parametrize(
    ("option", "value"),
    [("--set", "train.seed=1"), ("--preset", "fast"), ("--dataset", "."), ("--output", "x")],
)
def test_options_over_a_configuration_want_one(
    words: list[str], option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")
    words = [str(tmp_path / "a.safetensors") if word == "FILE" else word for word in words]
    assert main([*words, option, value]) == ExitCode.BAD_CONFIG
    assert f"{option}: there is no configuration" in capsys.readouterr().err


def test_python_m_trainer() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "trainer", "config", "check", "missing.yaml"],
        cwd=REPOSITORY,
        text=True,
        capture_output=True,
    )
    assert result.returncode == 78
    assert "missing.yaml: no such file" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "trainer", "config", "schema"]
    result = subprocess.run(command, cwd=REPOSITORY, text=True, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    assert result.returncode == 141
    assert result.stderr == ""


@pytest.mark.parametrize(
    "surroundings",
    [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}],
    ids=["locale", "stream"],
)
def test_names_and_words_are_utf8_whatever_the_locale(surroundings: dict[str, str], tmp_path: Path) -> None:
    words = ["config", "show", "日本.yaml", "--set", "validation.prompts=[ü]", "--output", "ü"]
    config = (REPOSITORY / "train_configs/quickstart.yaml").read_text()
    (tmp_path / "日本.yaml").write_text(config)
    result = subprocess.run(
        [sys.executable, "-m", "trainer", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **surroundings},
        capture_output=True,
    )
    assert result.stderr == b""
    assert result.returncode == 0
    latin = "PYTHONIOENCODING" in surroundings
    shown = result.stdout.decode("latin-1" if latin else "utf-8")
    assert "- ü " in shown and "output_dir: ü " in shown
    assert ("\\u65e5\\u672c.yaml" if latin else "日本.yaml") in shown


def test_a_full_disk_behind_stdout_is_told() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "trainer", "config", "schema"]
        result = subprocess.run(command, cwd=REPOSITORY, text=True, stdout=full, stderr=subprocess.PIPE)
    assert result.returncode == 73
    assert "stdout: No space left on device while writing it" in result.stderr
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr


def test_errors_become_text(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def fails() -> None:
        raise DataError(
            [Problem(what="broken", where="a.png", remedy="save it again"), Problem(what="worse")]
        )

    assert run(fails, []) == 65
    assert capsys.readouterr().err == (
        "error: bad data, 2 problems (exit code 65)\na.png: broken\n    -> save it again\nworse\n"
    )
    assert error_text(DataError("broken", where="a.png")) == "error: bad data (exit code 65)\na.png: broken"


@pytest.mark.parametrize(
    ("words", "what", "where"),
    [
        (["--json", "plan", "nowhere.yaml"], "no such file", "nowhere.yaml"),
        (["plan", "nowhere.yaml", "--json"], "no such file", "nowhere.yaml"),
        (["--json", "plam"], "No such command 'plam'. Did you mean 'plan'?", "trainer"),
        (["--json", "train"], "Missing argument 'CONFIG...'.", "trainer train"),
        (["--json", "train", "--lora-rank", "4"], "trainer train has no such option", "--lora-rank"),
        (["--json", "--what"], "trainer has no such option", "--what"),
    ],
)
def test_errors_are_data_where_they_are_asked_for_so(
    words: list[str], what: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 78
    out, err = capsys.readouterr()
    assert what in err, "and text as always"
    (line,) = out.splitlines()
    told = json.loads(line)["error"]
    assert (told["exit_code"], told["meaning"]) == (78, "bad configuration")
    (problem,) = told["problems"]
    assert (problem["what"], problem["where"]) == (what, where) and problem["remedy"]


@pytest.mark.parametrize("words", [["plan", "nowhere.yaml"], ["compare", "--json", "t.json", "nowhere.yaml"]])
def test_without_being_asked_stdout_stays_empty(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 78
    assert capsys.readouterr().out == ""


def test_errors_as_data_have_no_secrets_and_every_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.group()
    @click.option("--json", is_flag=True)
    def tool(json: bool) -> None:
        pass

    @tool.command()
    def fails() -> None:
        raise DataError([Problem(what="secret-of-the-hub", where="a\x1b.png"), Problem(what="worse")])

    monkeypatch.setenv("HF_TOKEN", "secret-of-the-hub")
    assert run(tool, ["--json", "fails"]) == 65
    assert json.loads(capsys.readouterr().out)["error"]["problems"] == [
        {"what": "<redacted>", "where": "a\x1b.png", "remedy": ""},
        {"what": "worse", "where": "", "remedy": ""},
    ]


def test_an_error_of_the_plan_names_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where what found it knows the key alone."""
    path = tmp_path / "c.yaml"
    base = tmp_path / "nothing"
    path.write_text(
        f"family: llama\nmodel:\n  pretrained_model_name_or_path: {base}\n"
        f"data: {{sets: [{{chat_file: {tmp_path / 'chats.jsonl'}}}]}}\noutput_dir: {tmp_path / 'run'}\n"
    )
    assert main(["plan", str(path)]) == ExitCode.BAD_CONFIG
    key = "model.pretrained_model_name_or_path"
    assert f"{path}:3: {key}: the base model's folder {base} does not exist" in capsys.readouterr().err


def test_our_own_bugs_keep_their_traceback() -> None:
    @click.command()
    def buggy() -> None:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        run(buggy, [])


@pytest.mark.parametrize("refusal", [RuntimeError("can't start new thread"), BlockingIOError(11, "again")])
def test_a_limit_of_processes_is_told(refusal: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def limited() -> None:
        raise refusal

    assert run(limited, []) == ExitCode.HARDWARE
    told = capsys.readouterr().err
    assert "no more processes and threads can be started" in told and "ulimit -u" in told


def test_the_number_a_command_returns_is_the_exit_code() -> None:
    @click.command()
    @click.argument("how")
    @click.pass_context
    def ends(context: click.Context, how: str) -> int | None:
        if how == "exits":
            context.exit(1)
        return ExitCode.STOPPED if how == "returns" else None

    assert run(ends, ["returns"]) == 75
    assert run(ends, ["exits"]) == 1
    assert run(ends, ["falls through"]) == 0


def test_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert run(interrupted, []) == 130
    assert "interrupted" in capsys.readouterr().err
