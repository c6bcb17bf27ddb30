"""Changes of a plan by optimizers, EMA weights and kinds of adapters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.unit.modeling.test_adapters import LINEARS, built_size
from tests.unit.planning.conftest import machine
from tests.unit.planning.test_resolve import Config, plan
from trainer.cli.options import Layers
from trainer.config.reading.load import load
from trainer.config.schema import LoraSection, TrainSection
from trainer.errors import HardwareError
from trainer.families import get
from trainer.machine.reading import read_recorded
from trainer.planning.choose.optimizers import second_beta_and_decay
from trainer.planning.plan import Plan
from trainer.planning.planning import plan_run
from trainer.planning.shapes.adapters import COUNTED_RANK, adapter_parameters, kept_bytes, spared_bytes
from trainer.planning.shapes.geometry import Geometry

MACHINES = Path(__file__).resolve().parents[2] / "golden" / "machines"
FAMILY = "flux1_dev"


def planned(folder: Path, machine: str, *overrides: str, packages: Mapping[str, str] | None = None) -> Plan:
    path = folder / "c.yaml"
    path.write_text(
        f"family: {FAMILY}\nmodel:\n  pretrained_model_name_or_path: nobody/nothing\n"
        "data:\n  sets:\n    - img_dir: images\noutput_dir: out\n"
    )
    loaded = load([path], overrides=overrides, family_defaults={FAMILY: get(FAMILY).defaults}, environ={})
    facts = read_recorded(MACHINES / f"{machine}.json")
    facts = dataclasses.replace(facts, packages={**facts.packages, **(packages or {})})
    return plan_run(loaded, facts)


def bytes_of(plan: Plan) -> dict[str, int]:
    return {row.name: row.bytes for row in plan.train_memory}


@pytest.mark.parametrize(
    ("override", "optimizer", "install"),
    [
        ("train.optimizer=adamw_8bit", "adamw_8bit", "pip install -c constraints.txt -e '.[adamw-8bit]'"),
        ("train.optimizer=prodigy", "prodigy", "pip install -c constraints.txt -e '.[prodigy]'"),
        ("train.report_to=wandb", "adamw_fused_fp32", "pip install -c constraints.txt -e '.[wandb]'"),
    ],
)
def test_a_missing_package_is_refused_with_the_line_to_run(
    override: str, optimizer: str, install: str, tmp_path: Path
) -> None:
    overrides = (override, "train.learning_rate=1")
    everything = {"bitsandbytes": "0.50.2", "prodigyopt": "1.1.2", "wandb": "0.31.0"}
    plan = planned(tmp_path, "h200", *overrides, packages=everything)
    assert plan.optimizer == optimizer
    with pytest.raises(HardwareError) as caught:
        facts = read_recorded(MACHINES / "h200.json")
        bare = {name: version for name, version in facts.packages.items() if name not in everything}
        loaded = load(
            [tmp_path / "c.yaml"],
            overrides=overrides,
            family_defaults={FAMILY: get(FAMILY).defaults},
            environ={},
        )
        plan_run(loaded, dataclasses.replace(facts, packages=bare))
    assert install in str(caught.value)
    assert f"--set {override.partition('=')[0]}" in str(caught.value)


def test_memory_and_disk_count_the_optimizer_and_the_mean(tmp_path: Path) -> None:
    packages = {"prodigyopt": "1.1.2"}
    rate = "train.learning_rate=1"
    plain = planned(tmp_path, "h200", rate)
    count = bytes_of(plain)["optimizer state"] // 8
    for optimizer, size in (("adamw_8bit", 2 * (1 + 4 / 256)), ("prodigy", 16)):
        plan = planned(tmp_path, "h200", rate, f"train.optimizer={optimizer}", packages=packages)
        assert bytes_of(plan)["optimizer state"] == int(count * size)
        assert "EMA" not in bytes_of(plan)
        checkpoints = (plan.disk_bytes - plain.disk_bytes) / (count * (size - 8))
        assert checkpoints == pytest.approx(round(checkpoints), abs=1e-3) and checkpoints >= 1
    mean = planned(tmp_path, "h200", rate, "train.ema_decay=0.999")
    assert bytes_of(mean)["EMA"] == 4 * count
    assert mean.disk_bytes > plain.disk_bytes
    assert {row.feature for row in mean.decisions} - {row.feature for row in plain.decisions} == {"ema"}


def test_memory_counts_what_other_kinds_keep_for_backward(tmp_path: Path) -> None:
    """FLUX.1 at its defaults: layers of 3072 x 3072; 4096 tokens of the picture and 512 of the text."""
    off = ("features.activation_checkpointing=false", "features.compile=false", "features.weights=bf16")
    plain = bytes_of(planned(tmp_path, "h200", *off))["activations"]
    more = {
        name: bytes_of(planned(tmp_path, "h200", *off, name))["activations"] - plain
        for name in ("lora.type=lokr", "lora.type=dora", "lora.dropout=0.1")
    }
    weight = 3072 * 3072 * 2
    # of the attention's linears double blocks have 8 (half of them on the text alone), single ones 3
    layers = 19 * 8 + 38 * 3
    assert more["lora.type=lokr"] == (layers + 3) * weight
    tokens = 19 * 4 * (512 + 4608) + 38 * 3 * 4608
    assert more["lora.type=dora"] == 2 * tokens * 3072 * 2 + 4 * weight
    assert more["lora.dropout=0.1"] == tokens * 3072 * 3
    # with recomputation it is one block's
    on = ("features.activation_checkpointing=true", "features.compile=false", "features.weights=bf16")
    small, large = (
        bytes_of(planned(tmp_path, "h200", *on, *kind))["activations"] for kind in ((), ("lora.type=lokr",))
    )
    assert large - small == (8 + 3) * weight


def test_disk_counts_the_best_and_what_is_to_take_its_place(tmp_path: Path) -> None:
    held_out = "validation.held_out=2"
    kept = planned(tmp_path, "h200", held_out)
    off = planned(tmp_path, "h200", held_out, "checkpoint.keep_best=false")
    assert off.disk_bytes == planned(tmp_path, "h200").disk_bytes
    count = bytes_of(kept)["optimizer state"] // 8
    # two more copies of two files in bf16
    assert kept.disk_bytes - off.disk_bytes == 2 * 2 * 2 * count


def test_disk_counts_a_lora_beside_each_checkpoint(tmp_path: Path) -> None:
    plain, beside = planned(tmp_path, "h200"), planned(tmp_path, "h200", "checkpoint.lora_files=true")
    (said,) = [row.reason for row in beside.decisions if row.feature == "disk"]
    assert said == "4 checkpoints in output_dir, each with its LoRA, and the final files"
    # two files in bf16 for each of four
    assert beside.disk_bytes - plain.disk_bytes == 4 * 2 * 2 * (bytes_of(plain)["optimizer state"] // 8)


@pytest.mark.parametrize(
    "override", ["lora.type=dora", "lora.type=lokr", "lora.dropout=0.1", "model.dtype=fp16"]
)
def test_other_kinds_keep_to_the_plain_path_and_say_why(override: str, tmp_path: Path) -> None:
    fast, plain = planned(tmp_path, "h200"), planned(tmp_path, "h200", override)
    assert fast.compile and fast.cuda_graphs
    assert not plain.compile and not plain.cuda_graphs and not plain.swapped_blocks
    (row,) = (row for row in plain.decisions if row.feature == "compile")
    assert override.replace("=", ": ") in row.reason
    if override.startswith("lora.type"):
        assert plain.weights == "bf16"


@pytest.mark.parametrize("kind", ["dora", "lokr"])
def test_kinds_that_want_a_whole_base_do_not_fall_back_to_a_quantised_one(kind: str, tmp_path: Path) -> None:
    assert planned(tmp_path, "rtx-4090").weights != "bf16"
    with pytest.raises(HardwareError, match="wants a base that is not quantised"):
        planned(tmp_path, "rtx-4090", f"lora.type={kind}")


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "prodigy"])
def test_a_full_fine_tune_in_bf16_is_refused_other_optimizers(optimizer: str, tmp_path: Path) -> None:
    overrides = ("method=full", "train.learning_rate=1", f"train.optimizer={optimizer}")
    with pytest.raises(HardwareError, match="round its updates to bf16"):
        planned(tmp_path, "h200", *overrides, packages={"prodigyopt": "1.1.2"})


@pytest.mark.parametrize("trained", [(), ("method=full", "model.dtype=fp32")])
def test_weights_rounded_by_chance_are_for_full_fine_tunes_in_bf16(
    trained: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(HardwareError, match="is for full fine-tunes in bf16"):
        planned(tmp_path, "h200", *trained, "train.optimizer=adamw_stochastic_bf16")


def test_masters_are_given_up_where_nothing_else_fits(tmp_path: Path) -> None:
    """FLUX.1-dev: 10 bytes for each of 11.9 billion parameters are more than 100 GiB, 8 are 89."""
    full = ("method=full", "data.resolution=512")
    plans = {
        size: planned(tmp_path, "h200", *full, f"features.memory_budget={size}")
        for size in ("130GiB", "100GiB")
    }
    assert [plan.optimizer for plan in plans.values()] == ["adamw_split_bf16", "adamw_stochastic_bf16"]
    masters, none = (bytes_of(plan)["optimizer state"] for plan in plans.values())
    assert none == pytest.approx(masters * 4 / 6)
    (row,) = (row for row in plans["100GiB"].decisions if row.feature == "optimizer")
    assert row.source == "auto" and "rounded by chance; with fp32 masters the run needs 11" in row.reason
    written = planned(tmp_path, "h200", *full, "train.optimizer=adamw_stochastic_bf16")
    (row,) = (row for row in written.decisions if row.feature == "optimizer")
    assert (written.optimizer, row.source) == ("adamw_stochastic_bf16", "--set train.optimizer")


def test_what_recomputing_more_needs_is_said_of_the_same_optimizer(tmp_path: Path) -> None:
    """Llama-8B in 74 GiB: four of 32 blocks are recomputed, all of them with masters would need 79."""
    batch = ("data.max_sequence_length=2048", "train.gradient_accumulation_steps=8")
    overrides = ("data.sets=[{chat_file: chats.jsonl}]", *batch, "features.memory_budget=74GiB")
    loaded = Layers((Path("train_configs/llama_full.yaml"),), overrides, None, tmp_path).load()
    found = plan_run(loaded, machine("h200"))
    assert (found.optimizer, found.recomputed_blocks) == ("adamw_stochastic_bf16", 4)
    (row,) = (row for row in found.decisions if row.feature == "activation_checkpointing")
    assert row.reason.startswith("keeping 100% needs 7") and "all blocks" not in row.reason


@pytest.mark.parametrize("rank", [1, 4, 7, 40])
@pytest.mark.parametrize("kind", ["lora", "dora", "lokr"])
def test_the_planned_size_is_what_peft_builds(kind: str, rank: int) -> None:
    lora = LoraSection.model_validate({"type": kind, "rank": rank, "rank_pattern": {"to_k": 3, r"b\..*": 2}})
    assert adapter_parameters(LINEARS, lora) == built_size(lora)


@pytest.mark.parametrize("recorded", ["h200", "dgx-spark"])
def test_a_full_fine_tune_in_bf16_has_split_masters_and_takes_any_beta_and_decay(
    config: Config, geometry: Geometry, recorded: str
) -> None:
    asked = {"train__adam_beta2": 0.9999, "train__weight_decay": 0.1}
    for written in ({}, asked):
        found = plan(config(method="full", model__dtype="bf16", **written), machine(recorded), geometry)
        (row,) = (row for row in found.decisions if row.feature == "optimizer")
        assert (row.value, row.source, found.optimizer) == ("adamw_split_bf16", "auto", row.value)
        assert not {row.feature for row in found.decisions} & {"adam_beta2", "weight_decay"}
    wide = plan(config(method="full", model__dtype="fp32"), machine(recorded), geometry)
    assert wide.optimizer == "adamw_fused_fp32"


def test_beta_and_decay_are_adamws_usual_ones_unless_they_are_written() -> None:
    assert second_beta_and_decay(TrainSection()) == (0.999, 0.01)
    assert second_beta_and_decay(TrainSection(adam_beta2=0.95, weight_decay=0.0)) == (0.95, 0.0)


def test_frozen_layers_spare_what_the_least_block_of_a_stack_reads() -> None:
    frozen = {
        "blocks.0.attn.to_q": (8, 4), "blocks.0.attn.to_k": (8, 4), "blocks.0.ff.up": (16, 4),
        "blocks.1.attn.to_q": (8, 2), "blocks.1.ff.up": (16, 6), "blocks.1.ff.down": (6, 16),
        "single.0.ff": (3, 5), "head": (9, 9),
    }  # fmt: skip
    found = spared_bytes(frozen, lambda name: 100 if name.endswith("down") else 10, re.compile(r".*attn.*"))
    assert found == {"blocks": (2 * 10, 4 * 10), "single": (0, 5 * 10)}


def test_layers_outside_of_blocks_keep_their_inputs_beside_those_of_the_blocks() -> None:
    """The adapter's dropout: what is left of an input in bf16, and a byte of its mask."""
    adapted = {"blocks.0.a": (8, 4), "blocks.0.b": (8, 4), "blocks.1.a": (8, 6), "head": (9, 7)}
    lora = LoraSection(rank=COUNTED_RANK, dropout=0.1)
    largest, beyond = kept_bytes(adapted, lora, lambda name: 10, 2)
    assert (largest, beyond) == ({"blocks": 10 * 8 * 3}, 10 * 7 * 3)
