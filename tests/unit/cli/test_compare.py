"""`trainer compare`: command lines that start nothing, and how variants are made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.runs import CPU_FACTS, ROOT
from trainer.cli import main
from trainer.engine.comparing import rounds
from trainer.errors import ExitCode

QUICKSTART = "train_configs/quickstart.yaml"


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRAINER_FACTS", str(CPU_FACTS))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([QUICKSTART], "one configuration is named"),
        ([QUICKSTART, "--vary", "lora.rank=4"], "names no two values"),
        ([QUICKSTART, "--vary", "train.max_train_steps=4,8"], "--learn set lengths"),
        ([QUICKSTART, "--vary", "output_dir=a,b"], "vary another key"),
        ([QUICKSTART, "--vary", "lora.rank=1,2,3,4,5,6,7,8,9"], "8 are the most"),
        ([QUICKSTART, "--vary", "lora.rnk=4,8"], "lora.rnk"),
        ([QUICKSTART, "--vary", "lora.rank=4,8", "--rounds", "0"], "no step would be timed"),
        ([QUICKSTART, "--vary", "lora.rank=4,8", "--rounds", "0", "--learn", "10"], "no step would be timed"),
        ([QUICKSTART, "--vary", "lora.rank=4,8", "--plot", "a.jpg"], "PNG"),
        ([QUICKSTART, "--vary", "lora.rank=4,8", "--output", "docs"], "it is not empty"),
        ([QUICKSTART, "--vary", "lora.rank=4,8", "--steps", "0"], "--steps"),
        (["a.yaml", "b.yaml"], "a.yaml"),
    ],
)
def test_mistakes_start_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("nothing may be started")

    monkeypatch.setattr(rounds, "compare", start)
    assert main(["compare", *words]) == 78
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dataset", "nowhere"], "--dataset: nowhere does not exist"),
        (["--set", "data.sets=[{img_dir: nowhere}]"], "`data.sets.0.img_dir`: nowhere does not exist"),
    ],
)
def test_samples_that_are_not_there_start_nothing(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by the first run, the place was a file that is removed at the end."""

    def start(*_: object) -> None:
        raise AssertionError("nothing may be started")

    monkeypatch.setattr(rounds, "compare", start)
    assert main(["compare", QUICKSTART, "--vary", "lora.rank=4,8", *words]) == 65
    assert said in capsys.readouterr().err


def _variants(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> list[rounds.Variant]:
    """The variants of a command line whose runs are not made."""
    found: list[rounds.Variant] = []

    def compare(variants: list[rounds.Variant], *_: object) -> rounds.Outcome:
        found.extend(variants)
        return rounds.Outcome()

    monkeypatch.setattr(rounds, "compare", compare)
    assert main(["compare", *words]) == 0
    return found


def test_without_vary_each_file_is_a_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / QUICKSTART).read_text()
    for name, rank in (("a.yaml", 4), ("b.yaml", 32)):
        (tmp_path / name).write_text(
            text.replace("rank: 8", f"rank: {rank}").replace("seed: 0", f"seed: {rank}")
        )
    files = [str(tmp_path / name) for name in ("a.yaml", "b.yaml")]
    first, second = _variants(monkeypatch, [*files, "--set", "train.train_batch_size=2"])
    assert (first.name, second.name) == ("A a.yaml", "B b.yaml")
    assert (first.config.lora.rank, second.config.lora.rank) == (4, 32)
    assert first.config.train.train_batch_size == second.config.train.train_batch_size == 2
    out = capsys.readouterr().out
    assert "the configurations differ in lora.rank (4, 32)" in out and "seed" not in out, "B gets A's seed"


def test_held_out_samples_that_are_not_there_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "--vary",
        "lora.rank=4,8",
        "--set",
        "validation.img_dir=nowhere",
        "--set",
        "validation.held_out=0",
    ]
    assert len(_variants(monkeypatch, [QUICKSTART, *words])) == 2


def test_with_vary_files_are_laid_over_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "over.yaml").write_text("lora: {alpha: 3}\n")
    words = [QUICKSTART, str(tmp_path / "over.yaml"), "--vary", "lora.rank=4,8", "--vary", "train.seed=1,2"]
    found = _variants(monkeypatch, words)
    assert [one.config.lora.alpha for one in found] == [3.0, 3.0]
    assert [(one.title, one.config.train.seed, one.own_seed) for one in found] == [
        ("lora.rank=4, train.seed=1", 1, True),
        ("lora.rank=8, train.seed=2", 2, True),
    ]
    assert "train.seed (1, 2)" in capsys.readouterr().out


def test_a_comparison_without_a_step_says_that_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(*_: object) -> rounds.Outcome:
        return rounds.Outcome(code=ExitCode.STOPPED, why="stopped in cache A")

    monkeypatch.setattr(rounds, "compare", compare)
    record = tmp_path / "record.json"
    assert main(["compare", QUICKSTART, "--vary", "lora.rank=4,8", "--json", str(record)]) == 75
    told = "stopped in cache A: no step was trained, so there is nothing to compare"
    assert f"{told}, and {record} is not written" in capsys.readouterr().err and not record.exists()
