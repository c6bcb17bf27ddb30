"""The length of a run in steps or in epochs: one of them, of the highest layer that writes one."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cli.options import Layers
from trainer.config.reading.load import Loaded
from trainer.config.writing.dump import dump
from trainer.errors import ConfigError

LEAST = "family: flux1_dev\ndata: {sets: [{img_dir: images}]}\noutput_dir: out\n"


def loaded(
    folder: Path, *texts: str, presets: tuple[str, ...] = (), overrides: tuple[str, ...] = ()
) -> Loaded:
    files = []
    for number, text in enumerate((LEAST, *texts)):
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(text)
    return Layers(files, overrides, presets=presets).load()


def length(found: Loaded) -> tuple[float | None, int]:
    return found.config.train.num_train_epochs, found.config.train.max_train_steps


def test_both_in_one_file_are_an_error_at_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, "train:\n  num_train_epochs: 3\n  max_train_steps: 100\n")
    (problem,) = caught.value.problems
    assert problem.where == f"{tmp_path / '1.yaml'}:3" and problem.remedy == "remove one of them"
    assert "both say how long the run is" in problem.what


@pytest.mark.parametrize("text", ["0", "-1", "many", "nan"])
def test_no_epochs_are_no_length(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.num_train_epochs"):
        loaded(tmp_path, f"train: {{num_train_epochs: {text}}}\n")


def test_no_length_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.max_train_steps`: expected a whole number"):
        loaded(tmp_path, "train: {max_train_steps: null}\n")


def test_the_highest_layer_says_the_length_and_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, epochs = "train: {max_train_steps: 700}\n", "train: {num_train_epochs: 2.5}\n"
    assert length(loaded(tmp_path)) == (None, 1500)
    one = loaded(tmp_path, steps, epochs)
    assert one.config.train.num_train_epochs == 2.5
    assert one.notes == (
        f"train.num_train_epochs ({tmp_path / '2.yaml'}:1) takes the place of train.max_train_steps: 700"
        f" ({tmp_path / '1.yaml'}:1)",
    )
    other = loaded(tmp_path, epochs, steps)
    assert length(other) == (None, 700) and other.sources["train.num_train_epochs"] == "default"
    assert length(loaded(tmp_path, epochs, overrides=("train.max_train_steps=9",))) == (None, 9)
    preset = loaded(tmp_path, epochs, presets=("fast",))
    assert length(preset) == (None, 500)
    (note,) = [one for one in preset.notes if "takes the place" in one]
    assert note.startswith(
        "train.max_train_steps (preset fast) takes the place of train.num_train_epochs: 2.5"
    )
    above = loaded(tmp_path, steps, presets=("fast",), overrides=("train.num_train_epochs=1",))
    assert above.config.train.num_train_epochs == 1
    monkeypatch.setenv("TRAINER__TRAIN__NUM_TRAIN_EPOCHS", "4")
    assert loaded(tmp_path, steps).config.train.num_train_epochs == 4
    # nothing says a length by null
    assert length(loaded(tmp_path, steps, "train: {num_train_epochs: null}\n")) == (4, 1500)
    monkeypatch.delenv("TRAINER__TRAIN__NUM_TRAIN_EPOCHS")
    assert length(loaded(tmp_path, steps, "train: {num_train_epochs: null}\n")) == (None, 700)


WARM_UP = "train.lr_warmup_steps"


@pytest.mark.parametrize(("steps", "warm_up"), [(500, 20), (21, 20), (20, 2), (9, 0)])
def test_a_familys_warm_up_never_refuses_a_run(tmp_path: Path, steps: int, warm_up: int) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("family: qwen3\ndata: {sets: [{chat_file: a.jsonl}]}\noutput_dir: out\n")
    one = Layers([file], [f"train.max_train_steps={steps}"]).load()
    assert one.config.train.lr_warmup_steps == warm_up
    source = f"train.max_train_steps: {steps} (--set train.max_train_steps)"
    told = [f"{source} makes {WARM_UP} {warm_up} in place of 20 (family qwen3)"]
    assert list(one.notes) == (told if warm_up < 20 else [])


def test_a_length_laid_over_a_file_shortens_its_warm_up(tmp_path: Path) -> None:
    """So a trial of a few steps of a shipped file is one --set; what was written beside it is refused."""
    file, steps = "train: {lr_warmup_steps: 50}\n", "train: {max_train_steps: 30}\n"
    for one in (
        loaded(tmp_path, file, steps),
        loaded(tmp_path, file, overrides=("train.max_train_steps=30",)),
        loaded(tmp_path, presets=("style",), overrides=("train.max_train_steps=30",)),
    ):
        assert one.config.train.lr_warmup_steps == 3
        assert one.sources[WARM_UP] == "a tenth of train.max_train_steps"
        assert any(f"makes {WARM_UP} 3 in place of" in note for note in one.notes)
    together = "train: {max_train_steps: 30, lr_warmup_steps: 50}\n"
    for texts, overrides in (
        ((together,), ()),
        ((steps, file), ()),
        ((steps,), (f"{WARM_UP}=30",)),
        ((), (f"{WARM_UP}=50", "train.max_train_steps=30")),
    ):
        with pytest.raises(ConfigError, match="longer than its warm-up"):
            loaded(tmp_path, *texts, overrides=overrides)


def test_what_is_written_loads_again(tmp_path: Path) -> None:
    one = loaded(tmp_path, "train: {num_train_epochs: 2.5, lr_warmup_steps: 4000}\n")
    text = dump(one.config)
    assert "num_train_epochs: 2.5" in text and "max_train_steps" not in text
    (tmp_path / "again").mkdir()
    file = tmp_path / "again" / "c.yaml"
    file.write_text(text)
    assert Layers([file]).load().config == one.config
