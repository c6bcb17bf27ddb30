"""Base models from a folder or the hub: complete and identified, or refused with exit code and remedy."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub import constants

from tests.unit.modeling.fake_hub import COMMIT, REPOSITORY, FakeHub
from trainer.config.schema import RunConfig
from trainer.errors import AccessError, ConfigError, ExitCode, NoSpaceError, StoppedError, TrainerError
from trainer.modeling.base.base import local_folder
from trainer.modeling.base.hub import Download
from trainer.modeling.base.source import ModelSource, resolve_source, weights_line

COMPONENTS = ("transformer", "text_encoder", "text_encoder_2", "vae", "tokenizer", "tokenizer_2", "scheduler")
Make = Callable[..., RunConfig]


@pytest.fixture
def copy(tiny_flux1_dev: Path, tmp_path: Path) -> Path:
    """A base model that a test may damage."""
    return Path(shutil.copytree(tiny_flux1_dev, tmp_path / "my-base"))


def resolved(config: RunConfig, **options: Any) -> ModelSource:
    return resolve_source(config, COMPONENTS, trained="transformer", **options)


def refused(kind: type[TrainerError], code: ExitCode, config: RunConfig, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        resolved(config, **options)
    assert caught.value.exit_code == code
    return str(caught.value)


# ---- folders


def test_a_folder_is_used_as_it_is(tiny_flux1_dev: Path, run_config: Make) -> None:
    source = resolved(run_config(pretrained_model_name_or_path=str(tiny_flux1_dev)))
    assert source.folder == tiny_flux1_dev
    assert source.identity == "flux1_dev"
    assert source.component("vae") == tiny_flux1_dev / "vae"
    assert source.component_config("transformer")["num_layers"] == 2


def test_identity_and_fingerprint_do_not_depend_on_the_place(
    copy: Path, tmp_path: Path, run_config: Make
) -> None:
    here = resolved(run_config(pretrained_model_name_or_path=str(copy)))
    moved = Path(shutil.copytree(copy, tmp_path / "elsewhere" / "my-base"))
    there = resolved(run_config(pretrained_model_name_or_path=str(moved)))
    assert (here.identity, here.revision) == (there.identity, there.revision)


@pytest.mark.parametrize("position", [0, 100_000, -1])
def test_other_weights_of_equal_size_have_another_fingerprint(
    copy: Path, run_config: Make, position: int
) -> None:
    config = run_config(pretrained_model_name_or_path=str(copy))
    before = resolved(config).revision
    path = copy / "text_encoder/model.safetensors"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(bytes(content))
    assert resolved(config).revision != before


def test_large_files_are_sampled_from_end_to_end(copy: Path, run_config: Make) -> None:
    config = run_config(pretrained_model_name_or_path=str(copy))
    path = copy / "vae/diffusion_pytorch_model.safetensors"
    with path.open("r+b") as stream:
        stream.truncate(50_000_000)
    before = resolved(config).revision
    with path.open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"x")
    assert resolved(config).revision != before


@pytest.mark.parametrize("name", ["/no/such/base", "./base", "models/flux/dev", "base"])
def test_a_missing_folder_is_a_bad_configuration(run_config: Make, name: str) -> None:
    message = refused(ConfigError, ExitCode.BAD_CONFIG, run_config(pretrained_model_name_or_path=name))
    assert f"the base model's folder {name} does not exist" in message
    assert "or transformers' layout" in message
    assert "OWNER/NAME" in message


def _no_vae(folder: Path) -> None:
    shutil.rmtree(folder / "vae")


def _no_config(folder: Path) -> None:
    (folder / "tokenizer/tokenizer_config.json").unlink()


def _no_config_of_its_own(folder: Path) -> None:
    (folder / "text_encoder/config.json").rename(folder / "text_encoder/generation_config.json")


def _no_weights(folder: Path) -> None:
    (folder / "vae/diffusion_pytorch_model.safetensors").unlink()


def _pickled(folder: Path) -> None:
    path = folder / "vae/diffusion_pytorch_model.safetensors"
    path.rename(path.with_suffix(".bin"))


def _missing_shard(folder: Path) -> None:
    weights = folder / "transformer/diffusion_pytorch_model.safetensors"
    weights.rename(folder / "transformer/model-00001-of-00002.safetensors")
    index = (
        '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    )
    (folder / "transformer/model.safetensors.index.json").write_text(index)


def _broken_index(folder: Path) -> None:
    index = folder / "transformer/diffusion_pytorch_model.safetensors.index.json"
    index.write_text('{"weight_map": ')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_no_vae, "my-base/vae: the base model has no component 'vae'"),
        (_no_config, "my-base/tokenizer: no config file"),
        (_no_config_of_its_own, "my-base/text_encoder: no config.json"),
        (_no_weights, "my-base/vae: no .safetensors file"),
        (_pickled, "pickled weights are never loaded, convert them to safetensors"),
        (_missing_shard, "1 of 2 weight files are missing, first model-00002-of-00002.safetensors"),
        (_broken_index, "pytorch_model.safetensors.index.json: the index of the weight files cannot be read"),
    ],
)
def test_an_incomplete_folder_has_no_access(
    copy: Path, run_config: Make, damage: Callable[[Path], None], words: str
) -> None:
    damage(copy)
    message = refused(AccessError, ExitCode.NO_ACCESS, run_config(pretrained_model_name_or_path=str(copy)))
    assert words in message
    assert "->" in message, "every refusal says what to do"


def test_everything_missing_is_told_at_once(copy: Path, run_config: Make) -> None:
    _no_vae(copy)
    _no_config(copy)
    with pytest.raises(AccessError) as caught:
        resolved(run_config(pretrained_model_name_or_path=str(copy)))
    assert len(caught.value.problems) == 2


LEARNED = ("text_encoder", "text_encoder_2", "transformer", "vae")


def test_random_weights_need_configs_alone(copy: Path, run_config: Make) -> None:
    for path in copy.rglob("*.safetensors"):
        path.unlink()
    source = resolved(run_config(pretrained_model_name_or_path=str(copy), weights="random"))
    assert (source.random_components, source.seed) == (frozenset(LEARNED), 0)
    assert weights_line(source, COMPONENTS) == (
        "built from config.json with seed 0: transformer, text_encoder, text_encoder_2, vae; loaded: none"
    )


def test_random_weights_leave_learned_components_learned(copy: Path, run_config: Make) -> None:
    """The trained component is random though its weights exist; one without weights is random too."""
    (copy / "text_encoder/model.safetensors").unlink()
    config = run_config(pretrained_model_name_or_path=str(copy), weights="random")
    source = resolved(config)
    assert source.random_components == {"transformer", "text_encoder"}
    assert source.weights == "random (text_encoder, transformer)"
    assert weights_line(source, COMPONENTS).endswith("transformer, text_encoder; loaded: text_encoder_2, vae")


def test_random_weights_are_identified_by_what_is_loaded(copy: Path, run_config: Make) -> None:
    config = run_config(pretrained_model_name_or_path=str(copy), weights="random")

    def changed(component: str) -> bool:
        before = resolved(config).revision
        (path,) = (copy / component).glob("*.safetensors")
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        return resolved(config).revision != before

    assert changed("vae")
    assert not changed("transformer"), "its weights are not read"


def test_random_weights_do_not_stand_in_for_a_missing_shard(copy: Path, run_config: Make) -> None:
    weights = copy / "vae/diffusion_pytorch_model.safetensors"
    weights.rename(copy / "vae/model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (copy / "vae/model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    config = run_config(pretrained_model_name_or_path=str(copy), weights="random")
    assert "1 of 2 weight files are missing" in refused(AccessError, ExitCode.NO_ACCESS, config)


# ---- the hub


def test_download_then_offline(fake_hub: FakeHub, cache: Path, run_config: Make) -> None:
    starts: list[Download] = []
    done: list[tuple[int, int]] = []
    config = run_config(pretrained_model_name_or_path=REPOSITORY)
    assert local_folder(config) is None
    source = resolved(config, on_start=starts.append, on_bytes=lambda now, total: done.append((now, total)))
    assert (source.identity, source.revision) == (REPOSITORY, COMMIT)
    assert source.folder.is_relative_to(cache)
    needed = sum(path.stat().st_size for path in fake_hub.files())
    assert [(start.commit, start.missing_bytes) for start in starts] == [(COMMIT, needed)]
    assert done[-1] == (needed, needed)
    assert [now for now, _ in done] == sorted(now for now, _ in done)

    fake_hub.requests.clear()
    again = resolved(config)
    assert again == source
    assert local_folder(config) == source.folder
    assert fake_hub.requests == [], "what is here is used without asking"
    resolved(config, update=True, on_start=starts.append)
    assert fake_hub.requests, "an update asks"
    assert starts[-1].missing_bytes == 0
    assert not [path for method, path in fake_hub.requests if method == "GET" and "/resolve/" in path]


def test_only_what_the_run_needs_is_downloaded(fake_hub: FakeHub, copy: Path, run_config: Make) -> None:
    fake_hub.folder = copy
    (copy / "whole-model.safetensors").write_bytes(b"x")
    (copy / "text_encoder/consolidated.safetensors").write_bytes(b"x")
    (copy / "vae/diffusion_pytorch_model.bin").write_bytes(b"x")
    (copy / "safety_checker").mkdir()
    (copy / "safety_checker/config.json").write_text("{}")
    source = resolved(run_config(pretrained_model_name_or_path=REPOSITORY))
    ours = {path.relative_to(copy) for path in copy.rglob("*") if path.is_file()}
    theirs = {path.relative_to(source.folder) for path in source.folder.rglob("*") if path.is_file()}
    assert {str(path) for path in ours - theirs} == {
        "whole-model.safetensors",
        "text_encoder/consolidated.safetensors",
        "vae/diffusion_pytorch_model.bin",
        "safety_checker/config.json",
    }


def test_random_weights_download_no_weights(fake_hub: FakeHub, run_config: Make) -> None:
    config = run_config(pretrained_model_name_or_path=REPOSITORY, weights="random")
    source = resolved(config)
    assert not list(source.folder.rglob("*.safetensors"))
    assert source.random_components == set(LEARNED)
    # the same snapshot is not complete for a run with the real weights
    real = resolved(run_config(pretrained_model_name_or_path=REPOSITORY))
    assert real.folder == source.folder
    assert list(real.folder.rglob("*.safetensors"))
    assert resolved(config).random_components == {"transformer"}, "the learned ones are here now"


def test_an_interrupted_download_continues(fake_hub: FakeHub, cache: Path, run_config: Make) -> None:
    config = run_config(pretrained_model_name_or_path=REPOSITORY)
    fake_hub.cut_after = 100_000
    message = refused(AccessError, ExitCode.NO_ACCESS, config)
    assert "what was downloaded is kept" in message
    kept = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    assert kept > 0

    fake_hub.cut_after = None
    starts: list[Download] = []
    source = resolved(config, on_start=starts.append)
    assert starts[0].missing_bytes < starts[0].total_bytes
    for file in fake_hub.files():
        assert (source.folder / file.relative_to(fake_hub.folder)).read_bytes() == file.read_bytes()


def test_a_stop_request_ends_the_download(fake_hub: FakeHub, run_config: Make) -> None:
    def stop(done: int, total: int) -> None:
        raise StoppedError("asked to stop")

    config = run_config(pretrained_model_name_or_path=REPOSITORY)
    with pytest.raises(StoppedError):
        resolved(config, on_bytes=stop)


@pytest.mark.parametrize("status", [401, 403])
def test_gated(fake_hub: FakeHub, run_config: Make, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setenv("HF_TOKEN_PATH", "/run/secrets/hf")
    fake_hub.refuse = (status, "GatedRepo")
    message = refused(AccessError, ExitCode.NO_ACCESS, run_config(pretrained_model_name_or_path=REPOSITORY))
    assert "accept the licence on https://huggingface.co/owner/model" in message
    assert "/run/secrets/hf" in message
    assert "HF_TOKEN_PATH" in message


def test_forbidden_without_a_code_reads_as_gated(fake_hub: FakeHub, run_config: Make) -> None:
    fake_hub.refuse_listing = (403, "")
    message = refused(AccessError, ExitCode.NO_ACCESS, run_config(pretrained_model_name_or_path=REPOSITORY))
    assert "https://huggingface.co/owner/model" in message


@pytest.mark.parametrize("status", [401, 404])
def test_not_found(fake_hub: FakeHub, run_config: Make, status: int) -> None:
    fake_hub.refuse_listing = (status, "RepoNotFound")
    message = refused(AccessError, ExitCode.NO_ACCESS, run_config(pretrained_model_name_or_path=REPOSITORY))
    assert "owner/model is no folder here, and the hub does not show such a repository" in message


def test_unknown_revision(fake_hub: FakeHub, run_config: Make) -> None:
    config = run_config(pretrained_model_name_or_path=REPOSITORY, revision="v9")
    message = refused(AccessError, ExitCode.NO_ACCESS, config)
    assert message.startswith("model.revision: owner/model has no revision 'v9'")


def test_server_error(fake_hub: FakeHub, run_config: Make) -> None:
    fake_hub.refuse_listing = (503, "")
    message = refused(AccessError, ExitCode.NO_ACCESS, run_config(pretrained_model_name_or_path=REPOSITORY))
    assert "the hub answered 503" in message


@pytest.mark.parametrize("error", [httpx2.ConnectError, httpx2.ReadTimeout, httpx2.ProxyError])
def test_no_network(fake_hub: FakeHub, run_config: Make, error: type[httpx2.TransportError]) -> None:
    fake_hub.network_error = error
    message = refused(AccessError, ExitCode.NO_ACCESS, run_config(pretrained_model_name_or_path=REPOSITORY))
    assert f"could not be downloaded ({error.__name__}: no route to host)" in message
    assert "check network and proxy" in message


def test_a_repository_without_the_component(fake_hub: FakeHub, copy: Path, run_config: Make) -> None:
    fake_hub.folder = copy
    _no_vae(copy)
    message = refused(AccessError, ExitCode.NO_ACCESS, run_config(pretrained_model_name_or_path=REPOSITORY))
    assert "no component 'vae'" in message
    assert "the right one for the family?" in message


def test_too_small_a_disk_is_told_before_the_first_byte(
    fake_hub: FakeHub, run_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr("trainer.modeling.base.hub.shutil.disk_usage", lambda path: usage)
    config = run_config(pretrained_model_name_or_path=REPOSITORY)
    message = refused(NoSpaceError, ExitCode.NO_SPACE, config)
    assert "needs 0.0 GB more, 0.0 GB are free" in message
    assert "HF_HOME" in message
    assert not [path for method, path in fake_hub.requests if method == "GET" and "/resolve/" in path]


def test_a_disk_that_fills_meanwhile(
    fake_hub: FakeHub, run_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(done: int, total: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = run_config(pretrained_model_name_or_path=REPOSITORY)
    refused(NoSpaceError, ExitCode.NO_SPACE, config, on_bytes=full)


@pytest.mark.parametrize("how", ["model.download: never", "HF_HUB_OFFLINE"])
@pytest.mark.parametrize("partial", [False, True])
def test_offline_without_the_model(
    fake_hub: FakeHub, run_config: Make, monkeypatch: pytest.MonkeyPatch, how: str, partial: bool
) -> None:
    if partial:
        resolved(run_config(pretrained_model_name_or_path=REPOSITORY, weights="random"))
        fake_hub.requests.clear()
    if how == "HF_HUB_OFFLINE":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    download = "never" if how.startswith("model") else "auto"
    config = run_config(pretrained_model_name_or_path=REPOSITORY, download=download)
    message = refused(AccessError, ExitCode.NO_ACCESS, config, update=True)
    assert f"{how} forbids downloading it" in message
    assert "trainer fetch" in message
    assert fake_hub.requests == []


def test_offline_with_the_model(fake_hub: FakeHub, run_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(pretrained_model_name_or_path=REPOSITORY)
    online = resolved(config)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolved(config, update=True) == online


def test_no_model_library_is_imported() -> None:
    code = (
        "import sys; import trainer.modeling.base.source, trainer.modeling.base.hub;"
        "trainer.modeling.base.hub.is_repository_id('a/b');"
        "sys.exit(bool({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
