"""The base model's place and files on disk: one answer for plan, loader, fetch and preflight."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.unit.modeling.fake_hub import COMMIT, REPOSITORY, FakeHub
from tests.unit.planning.conftest import machine
from trainer.cli import main
from trainer.config.reading.load import Loaded
from trainer.config.schema import RunConfig
from trainer.errors import AccessError
from trainer.families import components, get
from trainer.files.weight_files import read_header, weight_files
from trainer.modeling.base import hub
from trainer.modeling.base.base import base_at, local_folder
from trainer.modeling.base.load import shard_files
from trainer.modeling.base.source import pinned, resolve_source
from trainer.planning.plan import Plan
from trainer.planning.planning import plan_run, prepare_base, run_attention
from trainer.planning.shapes import meta_shapes
from trainer.planning.shapes.geometry import TABLES, read_table
from trainer.planning.shapes.run_shapes import CONFIGS

FLUX = get("flux1_dev")
Make = Callable[..., RunConfig]
SHARDS = tuple(f"diffusion_pytorch_model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def write_shapes(file: Path, names: list[str]) -> None:
    """Tensors of one bf16 value."""
    header = {
        name: {"dtype": "BF16", "shape": [1, 1], "data_offsets": [2 * number, 2 * number + 2]}
        for number, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(2 * len(names)))


def write_index(folder: Path, **more: object) -> None:
    index = {"weight_map": {f"{number}.weight": shard for number, shard in enumerate(SHARDS)}, **more}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


# ---- one component


def test_files_are_those_of_the_index(tmp_path: Path) -> None:
    write_index(tmp_path)
    for name in SHARDS:
        write_shapes(tmp_path / name, [name])
    write_shapes(tmp_path / "consolidated.safetensors", ["all"])
    write_shapes(tmp_path / "diffusion_pytorch_model.fp16.safetensors", ["half"])
    found = weight_files(tmp_path)
    assert ([file.name for file in found.files], found.state) == (list(SHARDS), "complete")
    assert shard_files(tmp_path) == list(found.files)
    (tmp_path / SHARDS[1]).unlink()
    found = weight_files(tmp_path)
    assert (found.state, found.missing) == ("partial", (SHARDS[1],))
    with pytest.raises(AccessError, match="1 of 3 weight files are missing"):
        shard_files(tmp_path)


@pytest.mark.parametrize(
    ("names", "index", "read"),
    [
        # transformers looks for the single file first, diffusers for the index
        (["model.safetensors"], "model", ["model.safetensors"]),
        (["diffusion_pytorch_model.safetensors"], "diffusion_pytorch_model", list(SHARDS)),
        ([], "model", list(SHARDS)),
        (["model.fp16.safetensors"], "model", list(SHARDS)),
        (["model.safetensors"], "consolidated", ["model.safetensors"]),
    ],
)
def test_of_a_file_and_an_index_its_library_reads_one(
    tmp_path: Path, names: list[str], index: str, read: list[str]
) -> None:
    for name in (*names, *SHARDS):
        write_shapes(tmp_path / name, [name])
    write_index(tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").rename(
        tmp_path / f"{index}.safetensors.index.json"
    )
    assert [file.name for file in weight_files(tmp_path).files] == read


def test_an_index_is_read_beside_a_link_to_nothing(tmp_path: Path) -> None:
    write_index(tmp_path)
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").rename(
        tmp_path / "model.safetensors.index.json"
    )
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert weight_files(tmp_path).missing == SHARDS


def test_names_tell_of_shards_where_no_index_is_there_yet(tmp_path: Path) -> None:
    write_shapes(tmp_path / SHARDS[2], ["a"])
    assert weight_files(tmp_path).missing == SHARDS[:2]


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["model.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "model.fp16.safetensors"], ["model.safetensors"]),
        (
            ["model.safetensors", "diffusion_pytorch_model.safetensors"],
            ["diffusion_pytorch_model.safetensors"],
        ),
        (["a.safetensors", "b.safetensors", "consolidated.safetensors"], ["a.safetensors", "b.safetensors"]),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        ([], []),
    ],
)
def test_the_same_weights_are_not_counted_twice(tmp_path: Path, names: list[str], read: list[str]) -> None:
    for name in names:
        write_shapes(tmp_path / name, ["a"])
    found = weight_files(tmp_path)
    assert [file.name for file in found.files] == read
    assert found.state == ("complete" if read else "absent")


def test_a_link_to_nothing_is_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    found = weight_files(tmp_path)
    assert (found.files, found.missing, found.state) == ((), ("model.safetensors",), "absent")
    write_shapes(tmp_path / "blob", ["a"])
    assert weight_files(tmp_path).state == "complete"


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": ["a"]}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../other/model.safetensors"}}',
        '{"weight_map": {"a": "/model.bin"}}',
        '{"weight_map": {"a": "a.safetensors", "b": "../b.safetensors"}}',
        '{"weight_map": {"a": "a.safetensors"}, "metadata": {"total_size": 1e999}}',
        "[" * 100_000,
    ],
)
def test_an_index_that_is_none_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(AccessError, match=r"model\.safetensors\.index\.json: the index"):
        weight_files(tmp_path)


def test_a_file_that_was_cut_off_is_named_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_shapes(path, ["a", "b"])
    assert sorted(read_header(path).tensors) == ["a", "b"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AccessError, match=r"model\.safetensors: .* ends after \d+ of \d+ bytes"):
        read_header(path)


NAMES = (
    "owner/model", "o/m", "a.b/c-d_e", "9/9", "model", "./base", "/no/such", "a/b/c", "a--b/c", "a/b..c",
    "-a/b", "a-/b", ".a/b", "a./b", "a/b.", "a/b-", "_a/b_", "a/b.git", "a.git/b", "a b/c", "caf\u00e9/x",
    "a/b\n",
    "", "a/", "/b", f"{'a' * 96}/{'b' * 96}", f"{'a' * 97}/b", f"a/{'b' * 97}",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_repositorys_name_is_what_the_library_takes_for_one(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not in its __all__

    taken = name.count("/") == 1
    try:
        validate_repo_id(name)
    except HFValidationError:
        taken = False
    assert hub.is_repository_id(name) == taken


@pytest.mark.parametrize("revision", [None, "main", "v1", COMMIT, "0" * 40, "v2", "none"])
def test_a_repository_is_found_where_the_library_finds_it(cache: Path, revision: str | None) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    top = cache / "models--owner--model"
    (top / "snapshots" / COMMIT).mkdir(parents=True)
    (top / "refs").mkdir()
    for name, commit in (("main", COMMIT), ("v1", COMMIT), ("v2", "1" * 40)):
        (top / "refs" / name).write_text(commit)
    try:
        found = Path(
            snapshot_download("owner/model", revision=revision, cache_dir=cache, local_files_only=True)
        )
    except LocalEntryNotFoundError:
        found = None
    assert hub.cached("owner/model", revision) == found


# ---- the plan


@pytest.fixture
def snapshot(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FLUX.1-dev in the hub's cache with all configs, and no weights yet."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    top = cache / "models--owner--model"
    (top / "refs").mkdir(parents=True)
    (top / "refs/main").write_text(COMMIT)
    folder = top / "snapshots" / COMMIT
    shutil.copytree(CONFIGS / "flux1_dev", folder)
    return folder


def begin(folder: Path) -> None:
    """Leave the transformer like an interrupted download: the index, one of three shards, a dead link."""
    transformer = folder / "transformer"
    names = list(read_table(TABLES / "flux1_dev.json")["transformer"])
    write_index(transformer, metadata={"total_size": 23_802_816_640})
    write_shapes(transformer / SHARDS[0], names[: len(names) // 3])
    (transformer / SHARDS[1]).symlink_to(folder / "blob-that-is-gone")


def planned(config: RunConfig) -> Plan:
    return plan_run(Loaded(config=config, sources={}), machine("rtx-4090"))


def rows(plan: Plan) -> dict[str, tuple[str, str]]:
    return {row.feature: (row.value, row.reason) for row in plan.decisions}


def test_shards_that_happen_to_be_here_are_not_the_model(snapshot: Path, run_config: Make) -> None:
    config = run_config(pretrained_model_name_or_path=REPOSITORY)
    before = rows(planned(config))
    begin(snapshot)
    during = rows(planned(config))
    assert "2 of 3 weight files are missing" in during["sizes"][1]
    assert "committed table of the full-size flux1_dev" in during["sizes"][1]
    told = {"sizes", "download"}
    assert {k: v for k, v in during.items() if k not in told} == {
        k: v for k, v in before.items() if k not in told
    }
    assert during["sizes"][0] == before["sizes"][0] == "11.9 B parameters"


def test_the_plan_says_what_is_to_be_downloaded(snapshot: Path, run_config: Make) -> None:
    config = run_config(pretrained_model_name_or_path=REPOSITORY)
    begin(snapshot)
    (snapshot / "vae/config.json").unlink()
    value, reason = rows(planned(config))["download"]
    # 23.8 GB of the transformer by its index, 9.5 of T5, 0.2 of CLIP and 0.2 of the VAE in bf16
    assert value == "about 33.7 GB"
    assert reason.startswith("owner/model: transformer: 2 of 3 weight files are missing")
    shutil.rmtree(snapshot.parent.parent)
    value, reason = rows(planned(config))["download"]
    assert (value, reason) == ("about 33.7 GB", "owner/model: nothing of it is on this disk yet")


def test_a_component_whose_download_has_not_begun_is_no_obstacle(snapshot: Path, run_config: Make) -> None:
    shutil.rmtree(snapshot / "transformer")
    shutil.rmtree(snapshot / "vae")
    config = run_config(pretrained_model_name_or_path=REPOSITORY)
    assert rows(planned(config))["sizes"][0] == "11.9 B parameters"
    assert run_attention(Loaded(config=config, sources={}), 1).heads == 24


def test_a_folder_that_lacks_a_shard_is_refused_by_the_plan(snapshot: Path, run_config: Make) -> None:
    begin(snapshot)
    with pytest.raises(AccessError, match="2 of 3 weight files are missing") as caught:
        planned(run_config(pretrained_model_name_or_path=str(snapshot)))
    assert "copy the missing files" in str(caught.value)


def test_another_size_is_planned_from_its_config(
    snapshot: Path, run_config: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A base that is not the family's own, half downloaded: its class says how large it will be."""
    monkeypatch.setenv("TRAINER_CACHE_DIR", str(tmp_path / "shapes"))
    begin(snapshot)
    path = snapshot / "transformer/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_single_layers": 2}))
    whole = read_table(TABLES / "flux1_dev.json")["transformer"]
    smaller = {
        name: shape for name, shape in whole.items() if not re.match(r"single.*?\.([2-9]|\d\d)\.", name)
    }
    monkeypatch.setattr(meta_shapes, "_ask_child", lambda *words: smaller)
    meta_shapes._kept.cache_clear()
    plan = planned(run_config(pretrained_model_name_or_path=REPOSITORY))
    meta_shapes._kept.cache_clear()
    assert rows(plan)["sizes"][0] == "6.8 B parameters"
    assert "transformer built on the meta device" in rows(plan)["sizes"][1]


# ---- what follows from it


def test_a_run_fetches_configs_before_it_plans(fake_hub: FakeHub, run_config: Make) -> None:
    config = run_config(pretrained_model_name_or_path=REPOSITORY)
    loaded = Loaded(config=config, sources={})
    prepare_base(loaded)
    base = base_at(local_folder(config), config, components(FLUX), trained="transformer")
    assert base.folder is not None and base.state == "partial"
    assert not list(base.folder.rglob("*.safetensors"))
    assert (base.folder / "transformer/config.json").exists()
    asked = len(fake_hub.requests)
    prepare_base(loaded)
    assert len(fake_hub.requests) == asked, "once is enough"
    resolve_source(config, components(FLUX), trained="transformer")
    assert base_at(local_folder(config), config, components(FLUX), trained="transformer").state == "complete"
    assert "download" not in rows(plan_run(loaded, machine("cpu")))


def test_configs_that_were_fetched_are_enough_for_random_weights(fake_hub: FakeHub, run_config: Make) -> None:
    config = run_config(pretrained_model_name_or_path=REPOSITORY, weights="random")
    prepare_base(Loaded(config=config, sources={}))
    base = base_at(local_folder(config), config, components(FLUX), trained="transformer")
    assert base.folder is not None and base.state == "complete"
    assert (base.folder / "tokenizer/tokenizer.json").exists()
    (base.folder / "tokenizer/tokenizer.json").unlink()
    assert base_at(local_folder(config), config, components(FLUX), trained="transformer").state == "partial"
    resolve_source(config, components(FLUX), trained="transformer")
    assert (base.folder / "tokenizer/tokenizer.json").exists()


def test_the_commit_is_told_and_kept(fake_hub: FakeHub, run_config: Make) -> None:
    config = run_config(pretrained_model_name_or_path=REPOSITORY)
    source = resolve_source(config, components(FLUX), trained="transformer")
    value, reason = rows(plan_run(Loaded(config=config, sources={}), machine("cpu")))["base"]
    assert (value, f"`model.revision: {COMMIT}` pins it" in reason) == (COMMIT[:12], True)
    kept = pinned(config, source)
    assert kept.model.revision == COMMIT
    fake_hub.requests.clear()
    assert resolve_source(kept, components(FLUX), trained="transformer").folder == source.folder
    assert not fake_hub.requests, "a commit that is here is not asked for"
    again = rows(plan_run(Loaded(config=kept, sources={}), machine("cpu")))["base"]
    assert again == (COMMIT[:12], f"the commit of {REPOSITORY} that is here")


def test_a_folder_has_no_commit_to_keep(tiny_flux1_dev: Path, run_config: Make) -> None:
    config = run_config(pretrained_model_name_or_path=str(tiny_flux1_dev))
    assert pinned(config, resolve_source(config, components(FLUX), trained="transformer")) == config


def test_a_lost_blob_is_downloaded_again(fake_hub: FakeHub, run_config: Make) -> None:
    config = run_config(pretrained_model_name_or_path=REPOSITORY)
    folder = resolve_source(config, components(FLUX), trained="transformer").folder
    for name in ("vae/diffusion_pytorch_model.safetensors", "tokenizer/tokenizer.json"):
        (folder / name).resolve().unlink()
    base = base_at(local_folder(config), config, components(FLUX), trained="transformer")
    assert [path.parent.name for path, _ in base.missing] == ["vae", "tokenizer"] or base.state == "partial"
    resolve_source(config, components(FLUX), trained="transformer")
    assert base_at(local_folder(config), config, components(FLUX), trained="transformer").state == "complete"


def test_what_must_not_be_downloaded_is_refused_before_the_plan(fake_hub: FakeHub, run_config: Make) -> None:
    config = run_config(pretrained_model_name_or_path=REPOSITORY, download="never")
    with pytest.raises(AccessError, match=r"model\.download: never forbids downloading it"):
        prepare_base(Loaded(config=config, sources={}))
    assert not fake_hub.requests


def test_the_command_says_the_size(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(snapshot)
    (tmp_path / "images").mkdir()
    path = tmp_path / "run.yaml"
    path.write_text(
        f"family: flux1_dev\ndata: {{sets: [{{img_dir: {tmp_path}/images}}]}}\n"
        f"model: {{pretrained_model_name_or_path: {REPOSITORY}}}\noutput_dir: {tmp_path}/run\n"
    )
    facts = Path(__file__).parents[2] / "golden/machines/rtx-4090.json"
    assert main(["plan", str(path), "--facts", str(facts)]) == 0
    shown = capsys.readouterr().out
    assert "about 33.7 GB" in shown
    assert "11.9 B parameters" in shown
