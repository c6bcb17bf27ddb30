"""`trainer score`: whose pictures are measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL.PngImagePlugin import PngInfo

from tests.scoring_models import write_dinov2
from tests.unit.data.pictures import bomb, picture, write_pair
from trainer.cli import main, score
from trainer.cli.options import Layers
from trainer.config.writing.dump import dump
from trainer.engine.scoring.score import Picture
from trainer.telemetry.run_folder import process

TEXT = """\
family: flux1_dev
train: {max_train_steps: 1}
data: {sets: [{img_dir: images}]}
validation: {prompts: [a cat], metrics: [nearest_train], dinov2_model: models/dinov2}
output_dir: runs/cats
"""


def test_a_runs_relative_paths_begin_where_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder, names in ((here, ("a.png", "b.png")), (elsewhere, ("c.png",))):
        (folder / "images").mkdir(parents=True)
        for number, name in enumerate(names):
            write_pair(folder / "images", name, seed=number)
    run = here / "runs/cats"
    (run / "samples/step-000000").mkdir(parents=True)
    write_pair(run / "samples/step-000000", "00.png")
    (here / "models").mkdir()
    write_dinov2(here / "models/dinov2")
    monkeypatch.chdir(here)
    (here / "my.yaml").write_text(TEXT)
    (run / "config.resolved.yaml").write_text(dump(Layers([here / "my.yaml"]).load().config))
    process.begin(run, supervisor=1, runtime_dir=tmp_path / "runtime")
    monkeypatch.chdir(elsewhere)
    capsys.readouterr()
    code = main(["score", str(run), "--metric", "nearest_train", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert json.loads(out)["training_pictures"] == 2


def test_a_run_that_asks_no_hub_is_measured_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`model.download: never` of its configuration holds for the models that measure it too."""
    from trainer.modeling.base import hub

    def asked(*given: object, **options: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "download", asked)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "images").mkdir()
    for number, name in enumerate(("a.png", "b.png")):
        write_pair(tmp_path / "images", name, seed=number)
    run = tmp_path / "runs/cats"
    (run / "samples/step-000000").mkdir(parents=True)
    write_pair(run / "samples/step-000000", "00.png")
    monkeypatch.chdir(tmp_path)
    text = TEXT.replace("models/dinov2", "someone/dinov2") + "model: {download: never}\n"
    (tmp_path / "my.yaml").write_text(text)
    (run / "config.resolved.yaml").write_text(dump(Layers([tmp_path / "my.yaml"]).load().config))
    process.begin(run, supervisor=1, runtime_dir=tmp_path / "runtime")
    capsys.readouterr()
    assert main(["score", str(run), "--metric", "nearest_train"]) == 77
    assert "someone/dinov2" in capsys.readouterr().err


def test_a_run_of_a_language_model_is_refused_whatever_it_has_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "family: llama\ndata: {sets: [{chat_file: a.jsonl}]}\noutput_dir: x\ntrain: {max_train_steps: 1}\n"
    (tmp_path / "config.resolved.yaml").write_text(text)
    (tmp_path / "run.json").write_text("{}")
    process.begin(tmp_path, supervisor=1, runtime_dir=tmp_path / "runtime")
    assert main(["score", str(tmp_path), "--data", str(tmp_path), "--clip", "x"]) == 78
    assert "Llama 3, which writes text" in capsys.readouterr().err


def test_only_who_named_a_metric_is_told_to_leave_it_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_pair(tmp_path, "a.png")
    said = []
    for options in ((), ("--metric", "kid")):
        assert main(["score", "--pictures", str(tmp_path), *options]) == 65
        said.append(capsys.readouterr().err)
    assert "--metric" not in said[0] and "leave --metric out" in said[1]
    assert all("--data names training pictures" in text for text in said)


@pytest.mark.parametrize("kind", ["text", "pixels"])
def test_a_png_that_pillow_refuses_is_told_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    if kind == "pixels":
        (tmp_path / "a.png").write_bytes(bomb())
    else:
        info = PngInfo()
        info.add_itxt("workflow", "a" * 3_000_000, zip=True)
        picture().save(tmp_path / "a.png", pnginfo=info)
    assert main(["score", "--pictures", str(tmp_path), "--clip", "x", "--data", str(tmp_path)]) == 65
    said = capsys.readouterr().err
    assert "cannot be read" in said and str(tmp_path / "a.png") in said


def test_a_mark_of_byte_order_is_no_part_of_the_first_prompt(tmp_path: Path) -> None:
    path = write_pair(tmp_path, "a.png")
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfa cat\n")
    asked = score._Asked(
        run=None,
        pictures=tmp_path,
        prompts=tmp_path / "prompts.txt",
        data=(),
        clip=None,
        dinov2=None,
        metrics=(),
        threshold=None,
    )
    (one,) = score._prompted(asked, [Picture(path=path, name="a.png")])
    assert one.prompt == "a cat"


@pytest.mark.parametrize(("names", "said"), [(("2", "10"), "10 comes before 2"), (("02", "10"), "no metric")])
def test_prompts_are_refused_where_names_have_two_orders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, ...], said: str
) -> None:
    (tmp_path / "out").mkdir()
    for name in names:
        write_pair(tmp_path / "out", f"{name}.png")
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    words = ["score", "--pictures", str(tmp_path / "out"), "--prompts", str(tmp_path / "prompts.txt")]
    code = main([*words, "--metric", "kid"])
    assert code == 65
    err = capsys.readouterr().err
    assert ("10 comes before 2" in err) is (said == "10 comes before 2")
