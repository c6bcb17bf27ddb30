"""`trainer fetch`, through the command line."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.scoring_models import write_clip
from tests.unit.modeling.fake_hub import COMMIT, REPOSITORY, FakeHub
from trainer.cli import fetch, main
from trainer.engine.scoring import models
from trainer.errors import AccessError, ExitCode
from trainer.modeling.base import hub
from trainer.modeling.base.hub import Download


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    path = tmp_path / "run.yaml"
    path.write_text(
        f"family: flux1_dev\n"
        f"data: {{sets: [{{img_dir: {tmp_path}/images}}]}}\n"
        f"model: {{pretrained_model_name_or_path: {REPOSITORY}}}\n"
        f"output_dir: {tmp_path}/run\n"
    )
    return path


def test_download_is_announced_and_reported(
    fake_hub: FakeHub, cache: Path, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", str(config_file)]) == 0
    out, err = capsys.readouterr()
    assert f"{REPOSITORY} at {COMMIT}" in err
    assert "GB to download" in err
    assert "free in" in err
    assert "downloading (MB) 3/3" in err
    assert f"revision    {COMMIT}" in out
    assert f"folder      {cache}" in out
    assert "size        0.00 GB" in out

    assert main(["fetch", str(config_file)]) == 0
    assert "0.00 GB to download" in capsys.readouterr().err


def test_a_folder_is_checked(
    tiny_flux1_dev: Path, tmp_path: Path, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = shutil.copytree(tiny_flux1_dev, tmp_path / "base")
    arguments = ["fetch", str(config_file), "--set", f"model.pretrained_model_name_or_path={base}"]
    assert main(arguments) == 0
    assert "base model  base\n" in capsys.readouterr().out
    (base / "vae/diffusion_pytorch_model.safetensors").unlink()
    assert main(arguments) == ExitCode.NO_ACCESS
    assert "no .safetensors file" in capsys.readouterr().err
    assert main([*arguments, "--set", "model.weights=random"]) == 0
    shown = capsys.readouterr().out
    assert "weights     built from config.json with seed 0: transformer, vae; loaded: text_encoder, " in shown


def test_gated(fake_hub: FakeHub, config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_hub.refuse = (401, "GatedRepo")
    assert main(["fetch", str(config_file)]) == ExitCode.NO_ACCESS
    err = capsys.readouterr().err
    assert err.startswith("error: no access to the base model (exit code 77)")
    assert "Traceback" not in err


def test_a_base_of_another_family_is_told(
    tiny_flux1_dev: Path, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--set", f"model.pretrained_model_name_or_path={tiny_flux1_dev}"]
    assert main(["fetch", str(config_file), *model, "--set", "family=kandinsky5"]) == ExitCode.BAD_CONFIG
    assert "write `family: flux1_dev`" in capsys.readouterr().err


def test_models_of_metrics_are_fetched_too(
    fake_hub: FakeHub, config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clip, metrics = write_clip(tmp_path / "clip"), ["--set", "validation.metrics=[clip_t]"]
    prompts = ["--set", "validation.prompts=[a red disc]"]
    arguments = ["fetch", str(config_file), *metrics, *prompts]
    assert main([*arguments, "--set", f"validation.clip_model={clip}"]) == 0
    assert f"clip        {clip}\n" in capsys.readouterr().out
    assert main([*arguments, "--set", f"validation.clip_model={tmp_path}/none"]) == ExitCode.BAD_CONFIG
    assert "validation.clip_model" in capsys.readouterr().err
    # the hub has one repository, and that is no CLIP: it is downloaded, then refused
    assert main([*arguments, "--set", f"validation.clip_model={REPOSITORY}"]) == ExitCode.NO_ACCESS
    assert "validation.clip_model" in capsys.readouterr().err


def test_what_another_program_left_out_of_a_model_of_metrics_is_fetched(
    fake_hub: FakeHub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`CLIPModel.from_pretrained` fetches config and weights alone."""
    fake_hub.folder = write_clip(tmp_path / "clip")
    folder = hub.download(REPOSITORY, None, ["config.json", "*.safetensors"])
    assert not list(folder.glob("*token*"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(AccessError, match="is not complete on this disk"):
        models.resolve("clip", REPOSITORY, "--clip")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    found = models.resolve("clip", REPOSITORY, "--clip")
    with models.loaded(found) as features:
        assert features.of_texts(["a red disc"], lambda: None)[1] == 0
    requests = len(fake_hub.requests)
    assert models.resolve("clip", REPOSITORY, "--clip") == found
    assert len(fake_hub.requests) == requests, "nothing is asked of the hub where all is here"


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("preprocessor_config.json", r"no preprocessor \(preprocessor_config\.json or "),
        ("tokenizer.json", r"no tokenizer \(tokenizer\.json or vocab\.json\)"),
    ],
)
def test_a_folder_without_a_part_of_the_model_is_refused_before_anything_is_loaded(
    file: str, words: str, tmp_path: Path
) -> None:
    clip = write_clip(tmp_path / "clip")
    (clip / file).unlink()
    with pytest.raises(AccessError, match=f"validation.clip_model: .*{words}") as caught:
        models.resolve("clip", str(clip), "validation.clip_model")
    assert "with its preprocessor" in caught.value.problems[0].remedy


def test_the_bar_of_a_second_download_moves_from_its_start(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.ExitStack() as stack:
        start, advance = fetch._reporter(stack)
        for name, size in (("a/large", 9_000_000), ("a/small", 3_000_000)):
            sizes = {"total_bytes": size, "missing_bytes": size, "free_bytes": 10**9}
            start(Download(repository=name, commit=COMMIT, folder=Path(), **sizes))
            advance(size, size)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "downloading" in line] == [
        "downloading (MB) 9/9",
        "downloading (MB) 3/3",
    ]
