"""Words of other trainers: each is an error that says what it is here; harmful variables are told by name."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from trainer.cli import main
from trainer.config import elsewhere, environment, fields
from trainer.config.reading.load import load
from trainer.config.reading.presets import shipped_folder
from trainer.config.schema import RunConfig
from trainer.errors import ConfigError

LEAST = "family: flux1_dev\ndata: {sets: [{img_dir: images}]}\noutput_dir: out\n"
ROWS = [row for group in elsewhere.keys().values() for row in group]
NAMES = [name for row in ROWS for name in row.names]
PROMISED = (
    "unified_memory", "memory_pool", "disable_cpu_offload", "cuda_version", "flash_attention_3",
    "fp8_training", "tf32_compute", "quantize", "fp8_backend", "deepspeed", "use_8bit_adam", "network_dim",
    "network_alpha", "unet_lr", "steps", "lr", "mixed_precision", "gradient_checkpointing", "cache_latents",
    "caption_ext", "sample_prompts", "save_every_n_steps", "xformers", "sdpa", "batch_size", "resolutions",
)  # fmt: skip


def problems(text: str = "", environ: dict[str, str] | None = None, *overrides: str) -> list[tuple[str, str]]:
    """Problem and remedy of each mistake in a configuration for an invented family."""
    family = {"flux1_dev": {"model": {"pretrained_model_name_or_path": "m"}}}
    file = Path("c.yaml")
    file.write_text(LEAST + text)
    try:
        load([file], overrides=overrides, family_defaults=family, environ=environ or {})
    except ConfigError as error:
        return [(one.what, one.remedy) for one in error.problems]
    return []


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_no_word_is_in_two_rows_or_ours() -> None:
    assert not [name for name, count in Counter(NAMES).items() if count > 1]
    leaves = {key.rpartition(".")[2]: key for key in fields.dotted_keys()} | {
        key: key for key in RunConfig.model_fields
    }
    # a set's entry of a dataset_info.json has this one too; elsewhere it is mostly the run's
    assert [name for name in NAMES if name in leaves] == ["name"]


def test_every_row_leads_to_a_key_of_ours_or_says_why_there_is_none() -> None:
    assert not [row for row in ROWS if row.ours and row.ours not in fields.dotted_keys()]
    assert not [row for row in ROWS if not row.ours and not row.note]
    mentioned = {key for row in ROWS for key in re.findall(r"\b([a-z]+\.[a-z_]+)\b", row.note)}
    assert {key for key in mentioned if key.partition(".")[0] in RunConfig.model_fields} <= set(
        fields.dotted_keys()
    )


def test_the_words_that_are_promised() -> None:
    assert not [name for name in PROMISED if elsewhere.key(name) is None]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[0])
def test_every_word_is_an_error_that_says_what_it_is_here(row: elsewhere.Row) -> None:
    text = "".join(f"{name}: 1\n" for name in row.names)
    found = problems(text)
    assert [what for what, _ in found] == [f"unknown key `{name}`" for name in row.names]
    assert {remedy for _, remedy in found} == {row.remedy}
    assert (f"`{row.ours}`" if row.ours else "there is none here") in row.remedy


@pytest.mark.parametrize("section", ["train", "lora", "features", "data"])
def test_a_word_in_a_section_of_ours_is_found_too(section: str) -> None:
    text = f"{section}:\n  Network-Dim: 4\n" if section != "data" else ""
    overrides = ("data.network_dim=4",) if section == "data" else ()
    found = problems(text, None, *overrides)
    assert [remedy for _, remedy in found] == ["did you mean `lora.rank`?"]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("sigmoid_scale", "flow.logit_std"),  # of sigmoid(scale * normal)
        ("flow_schedule_auto_shift", "flow.shift"),
        ("base_model_precision", "features.weights"),  # int8-quanto, nf4-bnb
        ("base_model_default_dtype", "model.dtype"),
        ("log_with", "train.report_to"),
        ("wandb_run_name", "output_dir"),
        ("caption_tag_dropout_rate", ""),  # of single tags, not of captions
        ("quantize_te", ""),
        ("offload_optimizer", ""),
        ("conv_dim", ""),
        ("d_coef", ""),
    ],
)
def test_words_that_look_like_another(name: str, ours: str) -> None:
    row = elsewhere.key(name)
    assert row is not None and row.ours == ours


def test_every_word_below_a_foreign_section_is_told() -> None:
    text = "config:\n  process:\n    - network: {linear: 4, linear_alpha: 4}\n      train: {steps: 9}\n"
    found = dict(problems(text))
    assert found["unknown key `config.process.0.network.linear`"] == "did you mean `lora.rank`?"
    assert "`lora.alpha`" in found["unknown key `config.process.0.network.linear_alpha`"]
    assert "`train.max_train_steps`" in found["unknown key `config.process.0.train.steps`"]


def test_a_variable_of_ours_with_a_foreign_word() -> None:
    assert problems("", {"TRAINER__UNET_LR": "1e-4"}) == [
        ("unknown key `unet_lr`", "did you mean `train.learning_rate`?")
    ]


@pytest.mark.parametrize("name", [name for row in elsewhere.files() for name in row.names])
def test_a_file_that_others_have(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = elsewhere.file(name)
    assert row is not None
    assert main(["config", "check", f"configs/{name}"]) == 78
    error = capsys.readouterr().err
    assert f"configs/{name}: no such file" in error and row.remedy in error
    if row.ours.startswith("train_configs/"):
        assert (shipped_folder().parent / row.ours).is_file()


@pytest.mark.parametrize("name", ["train-dgx-spark.yml", "Train_DGX_Spark.yaml"])
def test_spellings_of_a_file(name: str) -> None:
    row = elsewhere.file(name)
    assert row is not None and row.ours == "train_configs/hardware/dgx-spark.yaml"


def test_toml_is_said_to_be_toml(capsys: pytest.CaptureFixture[str]) -> None:
    Path("dataset.toml").write_text("[general]\nresolution = 1024\n")
    assert main(["config", "check", "dataset.toml"]) == 78
    assert "dataset.toml: this is TOML, a configuration is YAML" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["all", " ALL ".lower()])
def test_all_is_no_gpu(value: str) -> None:
    assert problems("", {"CUDA_VISIBLE_DEVICES": value}) == [
        ("`all` means no GPU at all", "unset it for all GPUs, or write their numbers: 0")
    ]
    assert not problems("", {"CUDA_VISIBLE_DEVICES": "0"})


WARNED = {
    "TRANSFORMERS_CACHE": ("/x", "HF_HOME"),
    "CUDA_MANAGED_FORCE_DEVICE_ALLOC": ("1", "does nothing for torch"),
    "PYTORCH_CUDA_ALLOC_CONF": ("expandable_segments:True", "the old spelling of PYTORCH_ALLOC_CONF"),
    "PYTORCH_ALLOC_CONF": ("backend:native", "backend:native is the default"),
    "NVTE_FP8_ALLREDUCE": ("1", "Transformer Engine"),
    "NVTE_FLASH_ATTN": ("1", "Transformer Engine"),
    "CUDA_LAUNCH_BLOCKING": ("1", "waits for every kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "slower"),
    "NVIDIA_TF32_OVERRIDE": ("0", "features.tf32"),
    "ACCELERATE_USE_DEEPSPEED": ("true", "not configured from outside"),
}


@pytest.mark.parametrize("name", WARNED)
def test_a_variable_without_effect_is_warned_of_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value, said = WARNED[name]
    Path("c.yaml").write_text(LEAST)
    for row in elsewhere.foreign():
        for one in row.names:
            monkeypatch.delenv(one, raising=False)
    assert main(["config", "check", "c.yaml"]) == 0
    assert "warning" not in capsys.readouterr().err
    monkeypatch.setenv(name, value)
    assert main(["config", "check", "c.yaml"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 1 and lines[0].startswith(f"warning: {name}: ") and said in lines[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("CUDA_LAUNCH_BLOCKING", "0"), ("PYTORCH_ALLOC_CONF", "expandable_segments:True"), ("NVTE_X", "")],
)
def test_harmless_values_are_not_warned_of(name: str, value: str) -> None:
    assert not list(elsewhere.variables({name: value}))


@pytest.mark.parametrize("name", [variable.name for variable in environment.VARIABLES])
def test_a_variable_that_is_listed_as_ours_is_not_called_useless(name: str) -> None:
    assert not list(elsewhere.variables({name: "1"}))


@pytest.mark.parametrize(
    ("name", "value", "warned"),
    [
        ("ACCELERATE_MIXED_PRECISION", "no", False),
        ("ACCELERATE_MIXED_PRECISION", "bf16", True),
        ("ACCELERATE_DYNAMO_BACKEND", "NO", False),
        ("ACCELERATE_USE_FSDP", "true", True),
    ],
)
def test_what_accelerate_launch_always_sets_is_not_warned_of(name: str, value: str, warned: bool) -> None:
    assert bool(list(elsewhere.variables({name: value}))) is warned


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_SIZE": "2"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"},
    ],
    ids=str,
)
def test_independent_runs_that_are_packed_into_one_job_are_warned_of(environ: dict[str, str]) -> None:
    assert not problems("", environ)
    ((_, row),) = elsewhere.variables(environ)
    assert "each of them is a run of its own" in row.says and not row.is_error
    assert not list(elsewhere.variables({**environ, "TRAINER_NODES": "2"})), "one of each machine"


@pytest.mark.parametrize(
    "environ",
    [{"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "4"}, {"SLURM_NTASKS": "4"}],
    ids=str,
)
def test_one_process_of_a_launcher_or_an_allocation_is_none(environ: dict[str, str]) -> None:
    assert not problems("", environ)
