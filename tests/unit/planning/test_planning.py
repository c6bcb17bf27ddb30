"""From a configuration and a base model on disk to a plan: sizes, folders, and the command."""

from __future__ import annotations

import functools
import importlib
import json
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from scripts.make_geometry import table_text
from tests.unit.planning.conftest import MACHINES, machine
from trainer.cli import main
from trainer.config.reading.load import Loaded, load
from trainer.config.schema import RunConfig
from trainer.errors import AccessError, ConfigError, HardwareError
from trainer.families import get, names
from trainer.files import codec
from trainer.files.component_shapes import header_shapes
from trainer.files.weight_files import weight_files
from trainer.modeling.adapter.targets import target_pattern
from trainer.modeling.base.meta_shapes import meta_shapes as build_shapes
from trainer.modeling.base.structure import built_empty
from trainer.planning.plan import Plan
from trainer.planning.planning import local_folder, plan_run, predict, run_attention
from trainer.planning.shapes import meta_shapes
from trainer.planning.shapes.geometry import NO_LINEARS, TABLES
from trainer.planning.shapes.run_shapes import CONFIGS, run_geometry
from trainer.ways.storages import find

FLUX = get("flux1_dev")
Config = Callable[..., RunConfig]


@pytest.mark.parametrize("family", ["flux1_dev", "kandinsky5"])
def test_the_committed_table_comes_from_the_committed_configs(family: str) -> None:
    expected = (TABLES / f"{family}.json").read_text()
    assert table_text(family, CONFIGS / family) == expected, f"run scripts/make_geometry.py {family}"


def test_parameters_that_a_class_keeps_in_fp32_are_known(config: Config) -> None:
    def kept(family: str, dtype: str) -> int:
        asked = config(family=family)
        return run_geometry(get(family), asked, model_folder=None, dtype=dtype).fp32_parameters

    # the modulation of 52 blocks and the last layer, and the embedding of the noise level
    assert kept("kandinsky5", "bf16") == 610_935_808
    assert kept("kandinsky5", "fp32") == kept("flux1_dev", "bf16") == 0


def test_sizes_of_a_folder_are_those_of_its_files(config: Config, tiny_flux1_dev: Path) -> None:
    from diffusers import FluxTransformer2DModel

    geometry = run_geometry(FLUX, config(lora__rank=4), model_folder=tiny_flux1_dev, dtype="fp32")
    model = FluxTransformer2DModel.from_pretrained(tiny_flux1_dev / "transformer")
    (trained,) = (part for part in geometry.components if part.role == "trained")
    assert trained.parameters == model.num_parameters()
    assert geometry.attention_shape_class == "b1 h4 d16 n4608"


def test_lora_parameters_are_those_that_peft_adds(config: Config, tiny_flux1_dev: Path) -> None:
    from diffusers import FluxTransformer2DModel
    from peft import LoraConfig

    from trainer.modeling.adapter import lora

    for targets in ("attention", "all-linear", ("to_q", "to_out.0")):
        asked = config(lora__rank=4, lora__target_modules=targets)
        geometry = run_geometry(FLUX, asked, model_folder=tiny_flux1_dev, dtype="fp32")
        model = FluxTransformer2DModel.from_pretrained(tiny_flux1_dev / "transformer")
        model.requires_grad_(False)
        names = lora.linear_names(model)
        pattern = target_pattern(asked.lora, FLUX.lora_targets, names)
        model.add_adapter(LoraConfig(r=4, target_modules=pattern))
        assert geometry.lora_parameters == model.num_parameters(only_trainable=True) > 0


WRONG = """\
family: flux1_dev
model: {pretrained_model_name_or_path: base}
data: {sets: [{img_dir: /data}]}
output_dir: /out
lora:
  target_modules:
    - to_q
    - to_kk
  rank_pattern:
    to_q: 8
    to_z: 2
  alpha_pattern: {ff: 2, '.*\\.77\\.to_q': 2}
"""


def test_names_of_no_layer_are_told_at_once_where_they_were_written(tmp_path: Path) -> None:
    """Before anything is loaded."""
    (tmp_path / "a.yaml").write_text(WRONG, encoding="utf-8")
    loaded = load([tmp_path / "a.yaml"], family_defaults={"flux1_dev": {}}, environ={})
    with pytest.raises(ConfigError) as caught:
        plan_run(loaded, machine("h200"), find_model=lambda _: None)
    found = [(one.where.rpartition(":")[2], one.what) for one in caught.value.problems]
    assert found == [
        ("8", "`lora.target_modules`: no linear layer is called 'to_kk'"),
        ("11", "`lora.rank_pattern`: no layer with an adapter is called 'to_z'"),
        ("12", "`lora.alpha_pattern`: no layer with an adapter is called 'ff'"),
        ("12", "`lora.alpha_pattern`: no layer with an adapter is called '.*\\.77\\.to_q'"),
    ]
    remedies = [one.remedy for one in caught.value.problems]
    assert remedies[0].startswith("did you mean 'to_k'? known: attn.add_k_proj, ")
    assert remedies[1].startswith("did you mean 'to_q'? known: attn.to_q")
    # a full fine-tune has no adapter whose layers could be named wrongly
    full = loaded.config.model_copy(update={"method": "full"})
    plan_run(Loaded(config=full, sources={}), machine("h200"), find_model=lambda _: None)


@pytest.mark.parametrize(("family", "least"), [("flux1_dev", 2.0), ("qwen_image", 8.0)])
def test_a_small_budget_is_planned_for_the_attention_kernel(
    config: Config, family: str, least: float
) -> None:
    """cuDNN's keeps more than flash: of Qwen-Image's it keeps what 60 % need."""

    def kept(attention: str) -> float:
        asked = config(
            family=family,
            features__attention=attention,
            features__activation_budget=0.2,
            features__weights="bf16",
            features__compute="bf16",
            features__compile=True,
        )
        found = plan_run(Loaded(config=asked, sources={}), machine("h200"), find_model=lambda _: None)
        return next(row.bytes for row in found.train_memory if row.name == "activations") / 2**30

    assert kept("cudnn") - kept("flash") > least


@pytest.mark.parametrize("family", [*names(), "llama, tied"])
def test_layers_that_can_have_an_adapter_are_those_of_the_model(
    config: Config, family: str, tiny_base: Callable[[str], Path], tmp_path: Path
) -> None:
    """The plan accepts each of them by name, and knows no other layer that can have an adapter."""
    from trainer.modeling.adapter.lora import linear_names

    name, _, tied = family.partition(", ")
    one, base = get(name), tiny_base(name)
    library, class_name = meta_shapes.component_class(base, one.trained_component)
    made: Any = getattr(importlib.import_module(library), class_name)
    if tied:  # files leave the head out
        model_config = made.config_class.from_pretrained(base, tie_word_embeddings=True)
        base = tmp_path / "tied"
        made(model_config).save_pretrained(base)
    model = built_empty(made, base / one.trained_component, torch.float32)
    every = tuple(linear_names(model))
    plan_of = functools.partial(run_geometry, one, model_folder=base, dtype="fp32")
    planned = plan_of(config(family=name, lora__rank=1, lora__target_modules=every)).lora_parameters
    sizes = [model.get_submodule(layer).weight.shape for layer in every]
    assert planned == sum(out + into for out, into in sizes)
    with pytest.raises(ConfigError, match="no linear layer is called 'zzz'") as caught:
        plan_of(config(family=name, lora__target_modules=("zzz",)))
    known = caught.value.problems[0].remedy.removeprefix("known: ").split(", ")
    assert known == sorted({re.sub(r"^.*\.\d+\.", "", layer) for layer in every})


@pytest.mark.parametrize(
    ("weights", "modulation_as", "besides"),
    [("int8", "", True), ("nf4", "", True), ("fp8", "", False), ("fp8", "int8", True)],
)
def test_packed_parameters_are_those_that_are_quantised(
    config: Config,
    tiny_flux1_dev: Path,
    weights: str,
    modulation_as: Literal["", "int8"],
    besides: bool,
) -> None:
    import torch
    from diffusers import FluxTransformer2DModel

    from trainer.modeling.storage.layers import replacer

    geometry = run_geometry(FLUX, config(), model_folder=tiny_flux1_dev, dtype="fp32")
    model = FluxTransformer2DModel.from_pretrained(tiny_flux1_dev / "transformer")
    replace = replacer(find(weights, modulation=modulation_as), FLUX.high_precision, FLUX.modulation)
    assert replace is not None
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    replaced = [module for name, module in linears if replace(name, module) is not None]
    more = geometry.modulation if besides else NO_LINEARS
    assert geometry.modulation.parameters > 0
    quantized = sum(module.in_features * module.out_features for module in replaced)
    assert geometry.quantized.parameters + more.parameters == quantized
    assert geometry.quantized.rows + more.rows == sum(module.out_features for module in replaced)


def test_a_full_fine_tune_and_wide_targets_keep_more_activations(config: Config) -> None:
    def saved(**changes: Any) -> int:
        return run_geometry(FLUX, config(**changes), model_folder=None, dtype="bf16").activations.saved

    assert saved() < saved(lora__target_modules="all-linear") < saved(method="full")
    assert saved(train__train_batch_size=2) == pytest.approx(2 * saved(), rel=1e-6)


def test_tiles_are_as_large_as_the_vae_was_trained_for(config: Config) -> None:
    at_1024 = run_geometry(FLUX, config(), model_folder=None, dtype="bf16")
    assert at_1024.vae_bytes_peak_tiled == at_1024.vae_bytes_peak
    at_2048 = run_geometry(FLUX, config(data__resolution=2048), model_folder=None, dtype="bf16")
    assert at_2048.vae_bytes_peak == 4 * at_2048.vae_bytes_peak_tiled


def test_configs_alone_are_enough_for_the_full_size_model(config: Config, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(CONFIGS / "flux1_dev", base)
    geometry = run_geometry(FLUX, config(), model_folder=base, dtype="bf16")
    assert "committed table" in geometry.components[0].source
    path = base / "transformer/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 5}))
    with pytest.raises(AccessError, match=r"differs from FLUX\.1-dev's in num_layers"):
        run_geometry(FLUX, config(), model_folder=base, dtype="bf16")


@pytest.fixture
def scratch(tiny_flux1_dev: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny base without the transformer's weights, and an empty cache folder."""
    monkeypatch.setenv("TRAINER_CACHE_DIR", str(tmp_path / "cache"))
    base = Path(shutil.copytree(tiny_flux1_dev, tmp_path / "base"))
    (base / "transformer/diffusion_pytorch_model.safetensors").unlink()
    return base


def test_a_base_that_is_not_here_is_told_to_have_another_ones_sizes(config: Config) -> None:
    def warned(name: str) -> list[str]:
        loaded = Loaded(config=config(model__pretrained_model_name_or_path=name), sources={})
        warnings = plan_run(loaded, machine("h200"), find_model=lambda _: None).warnings
        return [one for one in warnings if "nothing of" in one]

    ours = FLUX.defaults["model"]["pretrained_model_name_or_path"]
    assert warned(ours) == []
    (told,) = warned("owner/larger")
    assert told.startswith(
        f"nothing of owner/larger is here yet: sizes, memory, download and time are those of {ours}"
    )


@pytest.mark.slow
def test_what_trains_from_nothing_is_planned_from_its_config(
    config: Config, scratch: Path, tiny_flux1_dev: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(model__weights="random", data__resolution=64)
    planned = run_geometry(FLUX, asked, model_folder=scratch, dtype="fp32")
    measured = run_geometry(FLUX, config(data__resolution=64), model_folder=tiny_flux1_dev, dtype="fp32")
    found, expected = (
        {part.name: dict(part.shapes) for part in geometry.components} for geometry in (planned, measured)
    )
    assert found == expected
    sources = {part.name: part.source for part in planned.components}
    assert sources["transformer"] == "transformer built on the meta device from config.json"
    assert sources["vae"].startswith("safetensors headers of")
    assert len(list((tmp_path / "cache/shapes").iterdir())) == 1

    meta_shapes._kept.cache_clear()
    monkeypatch.setattr(meta_shapes, "_ask_child", lambda *arguments: pytest.fail("it was kept"))
    assert run_geometry(FLUX, asked, model_folder=scratch, dtype="fp32") == planned


def ask_here(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
    """Build the shapes in this process, with the errors that a child would end with."""
    folder, library, class_name = command[-3:]
    try:
        found = build_shapes(Path(folder), library, class_name)
    except (TypeError, ValueError):
        raise subprocess.CalledProcessError(1, command, stderr=traceback.format_exc()) from None
    return subprocess.CompletedProcess(command, 0, json.dumps(found), "")


def test_a_config_that_its_class_refuses_is_told(
    config: Config, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meta_shapes.subprocess, "run", ask_here)
    asked = config(model__weights="random")
    path = scratch / "transformer/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": "many"}))
    with pytest.raises(
        AccessError, match=r"FluxTransformer2DModel cannot be built from this config \(\w+Error"
    ):
        run_geometry(FLUX, asked, model_folder=scratch, dtype="fp32")
    path.write_text('{"num_layers": 1}')
    with pytest.raises(AccessError, match=r"config\.json: the config leaves out .*num_attention_heads"):
        run_geometry(FLUX, asked, model_folder=scratch, dtype="fp32")
    shutil.copy(CONFIGS / "flux1_dev/transformer/config.json", path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 1}))
    (scratch / "model_index.json").write_text('{"transformer": ["os", "system"]}')
    with pytest.raises(AccessError, match=r"model_index\.json: no class to build transformer with"):
        run_geometry(FLUX, asked, model_folder=scratch, dtype="fp32")


def test_weights_that_are_not_read_are_not_measured(
    config: Config, scratch: Path, tiny_flux1_dev: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meta_shapes, "_ask_child", build_shapes)
    path = scratch / "transformer/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 1}))
    shutil.copy(tiny_flux1_dev / "transformer/diffusion_pytorch_model.safetensors", scratch / "transformer")

    def blocks(weights: str) -> int:
        asked = config(model__weights=weights)
        part = run_geometry(FLUX, asked, model_folder=scratch, dtype="fp32").components[0]
        return len({name.split(".")[1] for name in part.shapes if name.startswith("transformer_blocks.")})

    assert (blocks("pretrained"), blocks("random")) == (2, 1)


def test_a_folder_that_does_not_exist_is_no_repository(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def folder(name: str) -> Path | None:
        return local_folder(config(model__pretrained_model_name_or_path=name))

    assert folder(str(tmp_path)) == tmp_path
    for missing in ("/no/such", "./base", "build/demo/base", "base"):
        with pytest.raises(ConfigError, match="does not exist"):
            folder(missing)


def test_a_run_on_the_tiny_base_is_planned(config: Config, tiny_flux1_dev: Path) -> None:
    asked = config(model__pretrained_model_name_or_path=str(tiny_flux1_dev), data__resolution=64)
    loaded = Loaded(config=asked, sources={})
    plan = plan_run(loaded, machine("cpu"))
    assert (plan.device, plan.dtype, plan.weights, plan.attention) == ("cpu", "fp32", "fp32", "native")
    assert header_shapes(weight_files(tiny_flux1_dev / "vae").files)
    assert run_attention(loaded, 1).heads == 4
    assert run_attention(loaded, 3).batch_size == 3
    with pytest.raises(HardwareError, match="profile rtx-4090"):
        plan_run(loaded, machine("dgx-spark"), "rtx-4090")


def test_planning_never_imports_torch(tiny_flux1_dev: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from trainer.cli import main; code = main(sys.argv[1:]);"
        "slow = {'torch', 'diffusers', 'transformers', 'rich'} & set(sys.modules);"
        "sys.exit(f'imported {slow}' if slow else code)"
    )
    config = write_config(tmp_path, tiny_flux1_dev)
    arguments = ["plan", str(config), "--facts", str(MACHINES / "cpu.json")]
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=60)


def write_config(folder: Path, base: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(
        f"family: flux1_dev\nmodel: {{pretrained_model_name_or_path: {base}}}\n"
        f"data: {{resolution: 64, sets: [{{img_dir: {folder / 'images'}}}]}}\noutput_dir: {folder / 'run'}\n"
    )
    return path


@pytest.fixture
def command(
    tmp_path: Path, tiny_flux1_dev: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """command(machine, *options): arguments of `trainer plan` for the tiny base."""
    for name in ("TRAINER_PROFILE", "TRAINER_FACTS"):
        monkeypatch.delenv(name, raising=False)
    path = write_config(tmp_path, tiny_flux1_dev)
    return lambda name, *options: ["plan", str(path), "--facts", str(MACHINES / f"{name}.json"), *options]


def test_the_command_prints_a_table(
    command: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command("rtx-4090")) == 0
    shown = capsys.readouterr().out
    assert "rtx-4090" in shown and "memory while training" in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "the facts file cannot be read: No such file or directory"),
        ("{}", "architecture: Field required"),
        (b"\xff\xfe", "the facts file is no text"),
    ],
)
@pytest.mark.parametrize("named_by", ["--facts", "TRAINER_FACTS"])
def test_facts_that_cannot_be_read_are_a_bad_configuration(
    command: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    named_by: str,
    text: str | bytes | None,
    said: str,
) -> None:
    file = tmp_path / "machine.json"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    words = command("h200")[:2]
    if named_by == "--facts":
        words += ["--facts", str(file)]
    else:
        monkeypatch.setenv("TRAINER_FACTS", str(file))
    assert main(words) == 78
    printed = capsys.readouterr().err
    assert f"{named_by}={file}: {said}" in printed
    assert f"give a file that `trainer probe --json` wrote, or leave {named_by} out" in printed


def test_the_command_prints_json_and_exports(
    command: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command("dgx-spark", "--json", "--set", "features.attention=efficient")) == 0
    plan = codec.from_json(Plan, capsys.readouterr().out, "plan.json")
    assert plan.attention == "efficient"
    assert ("attention", "--set features.attention") in [(row.feature, row.source) for row in plan.decisions]
    assert main(command("dgx-spark", "--export")) == 0
    assert capsys.readouterr().out == (
        "export CUDA_DEVICE_ORDER=PCI_BUS_ID\nexport PYTORCH_ALLOC_CONF=per_process_memory_fraction:0.75\n"
    )


def test_a_budget_option_is_the_key(
    command: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    for options, source in (
        (("--budget", "20GiB"), "--budget"),
        (("--set", "features.memory_budget=20GiB"), "--set features.memory_budget"),
    ):
        assert main(command("h200", "--json", *options)) == 0
        plan = codec.from_json(Plan, capsys.readouterr().out, "plan.json")
        assert plan.budget_bytes == 20 * 1024**3
        budget = next(row for row in plan.decisions if row.feature == "memory_budget")
        assert (budget.source, budget.value) == (source, "20.0 GiB")
    assert main(command("h200", "--budget", "20")) == 78
    assert "a size such as 24GiB" in capsys.readouterr().err


def test_predict_is_the_plan(config: Config, tiny_flux1_dev: Path) -> None:
    asked = config(model__pretrained_model_name_or_path=str(tiny_flux1_dev), data__resolution=64)
    facts = machine("h200")
    assert predict(asked, facts) == plan_run(Loaded(config=asked, sources={}), facts)


def test_refusals_are_text_with_exit_69(
    command: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(command("driver-550-cuda-13-torch")) == 69
    assert "upgrade the driver to 580 or newer" in capsys.readouterr().err
    assert main(command("missing")) == 78
    assert "missing.json" in capsys.readouterr().err
    monkeypatch.setenv("TRAINER_PROFILE", "dgx-spark")
    assert main(command("h200")) == 69
    assert "profile dgx-spark contradicts this machine (NVIDIA H200)" in capsys.readouterr().err
