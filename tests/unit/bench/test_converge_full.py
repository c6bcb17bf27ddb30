"""bench converge --method full: its text, verdicts and record, and all of it with emulated FP8."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import converge, converge_full, jobs, ours, page, plots, texts
from bench import converge_record as records
from bench.processes import Ended
from bench.record import from_json, to_json
from tests.emulated_fp8 import emulated
from tests.random_bases import byte_llama
from tests.unit.bench.test_bench import MACHINE
from trainer import families
from trainer.cli import measure
from trainer.cli.options import Layers
from trainer.config.reading.load import Loaded
from trainer.data import chat
from trainer.engine import run as engine
from trainer.engine.building import fp8
from trainer.engine.caching.samples import scan_samples
from trainer.engine.spec import read_spec
from trainer.errors import AccessError
from trainer.machine.facts import Facts
from trainer.modeling.quiet import quiet_libraries
from trainer.planning.plan import Plan
from trainer.telemetry import losses
from trainer.telemetry.measurement import Curves, Table

SEEDS = ("seed",)


# text


def test_text_is_cut_into_pieces_of_whole_lines() -> None:
    lines = [f"line {number} says nothing" for number in range(100)]
    pieces = list(texts.split_text("\n".join([*lines, "x" * 500]), 200))
    assert [line for piece in pieces for line in piece.splitlines()] == lines
    assert all(150 < len(piece) <= 200 for piece in pieces[:-1])
    assert list(texts.split_text("é" * 90 + "\n" + "é" * 90, 200)) == ["é" * 90, "é" * 90]


def test_docstrings_of_modules_classes_and_functions_are_read() -> None:
    source = b'"""Of the module."""\nclass A:\n    """Of a class."""\n    def f(self):\n        """Of f."""\n'
    assert texts.docstrings(source) == ["Of the module.", "Of a class.", "Of f."]
    assert texts.docstrings(b"def f(:") == texts.docstrings(b"x = 1") == []


def test_chats_are_read_by_the_family_and_no_module_is_in_both_files(tmp_path: Path) -> None:
    made = texts.write_texts(tmp_path / "a", most_bytes=300_000, packages=("numpy",), held_out=2)
    again = texts.write_texts(tmp_path / "b", most_bytes=300_000, packages=("numpy",), held_out=2)
    assert made.chat_file.read_bytes() == again.chat_file.read_bytes()
    assert 300_000 <= made.chat_file.stat().st_size < 400_000
    assert made.source.startswith("0.3 MB of docstrings of numpy ")
    modules = []
    for file in (made.chat_file, made.held_out_file):
        overrides = (f"data.sets=[{{chat_file: {file}}}]",)
        config = Layers((converge_full.REPOSITORY / "train_configs" / "llama_full.yaml",), overrides).load()
        found = chat.scan(config.config, None).records
        asked = [json.loads(record.caption)[0]["content"] for record in found]
        assert len({record.content_sha256 for record in found}) == len(found)
        modules.append({text.removeprefix("Document ").rpartition(",")[0] for text in asked})
    assert modules[0] and modules[1] and not modules[0] & modules[1]
    assert all(map(texts.is_held_out, modules[1]))
    assert len(made.held_out_file.read_text().splitlines()) == 2


def test_a_package_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="no_such_package, whose docstrings are the text"):
        texts.write_texts(tmp_path, most_bytes=1, packages=("no_such_package",))


def test_a_byte_is_a_token_and_all_sides_fit_fp8(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    quiet_libraries()
    byte_llama.build("small", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "def f(x):\n    return 'é'  # 42"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vocab_size"] >= len(tokenizer) == 261
    heads = [config["head_dim"] * config[key] for key in ("num_attention_heads", "num_key_value_heads")]
    sides = [config["hidden_size"], config["intermediate_size"], config["vocab_size"], *heads]
    assert all(side % 16 == 0 for side in sides)


# verdicts


def trained(last: float, **cosines: float) -> dict[str, Any]:
    found = {"losses": [4.0] * 50 + [last] * 50, "held_out": 2 * last, "proved": True}
    whole = {name: cosine - 0.1 for name, cosine in cosines.items()}  # of layers alone it is judged
    return {**found, "gradients": {"start": {"cosines": whole, "alone": cosines}}} if cosines else found


def row_of(last: float, seed: float, **cosines: float) -> dict[str, Any]:
    runs = {"bf16": trained(1.0), "fp8": trained(last, **cosines), "seed": trained(seed)}
    return records.rows_of(runs, SEEDS)[1]


@pytest.mark.parametrize(
    ("last", "seed", "cosine", "within", "inside", "points"),
    [
        (1.008, 0.98, 0.995, True, True, True),
        (0.992, 1.02, 0.995, True, True, True),
        (1.008, 0.995, 0.995, True, False, True),
        (1.015, 0.98, 0.995, False, True, True),
        (1.008, 0.98, 0.98, True, True, False),
    ],
)
def test_a_verdict_is_of_three(
    last: float, seed: float, cosine: float, within: bool, inside: bool, points: bool
) -> None:
    row = row_of(last, seed, a=0.999, b=cosine)
    assert (row["within_1_percent"], row["inside_band"], row["cosines_hold"]) == (within, inside, points)
    assert records.holds(row) is (within and inside and points)
    assert row["last_loss_ratio"] == pytest.approx(last, abs=1e-5)
    assert row["held_out_ratio"] == pytest.approx(last, abs=1e-5)
    said = records.sentence(row)
    assert ("NOT within 1 %" in said, "NOT inside" in said) == (not within, not inside)
    assert f"lowest cosine {cosine - 0.1:.4f} (b), median 0.8990, 2 of 2 tensors below 0.99" in said
    assert f"layers alone: lowest {cosine:.4f} (b)" in said


def test_nothing_holds_that_was_not_measured() -> None:
    rows = records.rows_of({"bf16": trained(1.0), "fp8": trained(1.0)}, SEEDS)
    assert [rows[1][key] for key in ("within_1_percent", "inside_band", "cosines_hold")] == [True, None, None]
    assert not records.holds(rows[1])
    failed = records.rows_of({"bf16": trained(1.0), "fp8": {"problem": "no unit"}}, SEEDS)[1]
    assert not records.holds(failed) and records.sentence(failed) == "fp8: not trained: no unit"
    assert records.cells(failed)[:2] == ("fp8", "no unit")
    assert len(records.cells(failed)) == len(records.cells(rows[1])) == len(records.COLUMNS)


def test_the_widest_seed_is_the_band() -> None:
    runs = {"bf16": trained(1.0), "one": trained(0.97), "two": trained(1.01)}
    rows = records.rows_of(runs, ("one", "two"))
    assert records.band_of(rows, ("one", "two")) == pytest.approx(0.03)
    assert "within_1_percent" not in rows[1]


# losses as curves


def test_a_curve_is_of_means() -> None:
    assert losses.steps_per_point(400) == 8 and losses.steps_per_point(6) == 1
    assert losses.curve([1.0, 3.0, 5.0, 7.0, 9.0], 2) == (2.0, 6.0)


def test_a_record_with_losses_becomes_a_table_and_a_plot(tmp_path: Path) -> None:
    record = tmp_path / "x.json"
    runs = {"bf16": trained(1.0), "fp8": trained(1.005, a=0.995), "bf16, another seed": trained(0.98)}
    rows = records.rows_of(runs, converge_full.SEEDS)
    curves = Curves(steps=2, losses={name: losses.curve(one["losses"], 2) for name, one in runs.items()})
    records.write(record, "A small model.", rows, curves, title="Full", month="2026-11")
    table = from_json(record.read_text(), "x")
    assert isinstance(table, Table) and table.curves == curves
    assert list(table.curves.losses) == list(runs), "the reference stays the first, whatever its name"
    assert "A small model.\n\nfp8: the last 50 steps' loss is 1.0050 of bf16's, within 1 %" in table.text
    assert table.rows[1][-3:] == ("yes", "yes", "yes") and table.rows[0][-3:] == ("", "", "")
    written = page.page({"x": table}, f"before {page.MARK} after")
    assert "![Losses](images/bench-x-losses.png)" in written and "| fp8 | 1.0050 |" in written
    plots.write_plots({"x": table}, tmp_path / "images")
    assert (tmp_path / "images" / "bench-x-losses.png").stat().st_size > 10_000
    drawn = plots.lines("Full", curves).axes[0].lines
    assert [line.get_label() for line in drawn] == list(runs)
    assert list(drawn[1].get_xdata()) == list(range(2, 101, 2))
    assert drawn[1].get_ydata()[-1] == pytest.approx(1.005)


def test_a_table_without_losses_has_no_plot(tmp_path: Path) -> None:
    table = Table(title="t", text="", machine=MACHINE, command="c", columns=("a",), rows=(("1",),))
    assert "curves" not in json.loads(to_json(table))
    assert from_json(to_json(table), "t") == table
    plots.write_plots({"t": table}, tmp_path / "images")
    assert not (tmp_path / "images").exists()


# the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "full", "--settings", "nf4"], "--method full has no setting nf4"),
        (["--settings", "bf16, another seed"], "--method lora has no setting bf16, another seed"),
        (["--method", "full", "--base", "."], "name the configuration"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        converge.main(arguments)
    assert said in capsys.readouterr().err


def plan_for(loaded: Loaded, *, probe: bool) -> tuple[Facts, Plan]:
    """A CPU's plan, with products in FP8 where they are asked for."""
    features = loaded.config.features
    changes = {"compute": "auto", "compile": False, "weight_gradient": "auto"}
    config = loaded.config.model_copy(update={"features": features.model_copy(update=changes)})
    nobody = loaded.sources["features.modulation"]
    sources = {**loaded.sources, **{f"features.{key}": nobody for key in changes}}
    plain = dataclasses.replace(loaded, config=config, sources=sources)
    facts, plan = measure.planned(plain, probe=probe)
    if features.compute == "fp8":
        gradient = features.weight_gradient
        plan = dataclasses.replace(plan, compute="fp8", weight_copies=2, weight_gradient=gradient)
    return facts, plan


def train_here(
    configs: Sequence[Path], folder: Path, overrides: Sequence[str], environ: Mapping[str, str], port: int
) -> Ended:
    """`jobs.train` without processes."""
    loaded = Layers(configs, overrides, None, folder).load()
    own = folder.with_name(f"{folder.name}.files")
    own.mkdir()
    path = jobs.write_job(loaded, plan_for(loaded, probe=False)[1], own, loaded.config.data.cache_dir)
    said: list[str] = []
    context = dataclasses.replace(jobs.make_context(str(path)), say=said.append)
    engine.train(context, scan_samples(context.family, context.config), read_spec(path))
    return Ended(code=0, host_gib=0.0, said="\n".join(said))


def call_here(
    job: Any,
    loaded: Loaded,
    plan: Plan,
    folder: Path,
    given: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    log: Path,
    cache: Path,
) -> Ended:
    """`jobs.call` without processes."""
    answer = job(spec=str(jobs.write_job(loaded, plan, folder, cache)), **given)
    return Ended(code=0, host_gib=0.0, said="", answer=json.loads(json.dumps(answer)))


@pytest.mark.parametrize("family", ["flux1_dev", "qwen_image_edit", "llama"])
def test_a_configuration_trains_on_what_lies_in_the_repository(family: str, tmp_path: Path) -> None:
    config = converge_full.REPOSITORY / "train_configs" / f"{family}_full.yaml"
    options = argparse.Namespace(config=config, steps=None, base=None, blocks=None, overrides=())
    chosen = converge_full.subject(options, tmp_path)
    assert "on tests/data/real_shaped." in chosen.text and chosen.steps == converge_full.STEPS["pictures"]
    given = Layers((config,), (*chosen.overrides, f"data.cache_dir={tmp_path}")).load().config
    (one,) = given.data.sets
    folders = [path for path in (one.img_dir, one.control_dir, one.chat_file) if path is not None]
    assert folders and all(Path(path).exists() and "real_shaped" in str(path) for path in folders)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "flux1_dev"])
def test_the_whole_command_with_emulated_fp8(
    family: str,
    tiny_base: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRAINER_PROFILE", "cpu")
    monkeypatch.setattr(fp8, "_Products", emulated)
    monkeypatch.setattr(converge_full, "planned", plan_for)
    monkeypatch.setattr(jobs, "train", train_here)
    monkeypatch.setattr(jobs, "call", call_here)
    monkeypatch.setattr(texts, "write_texts", functools.partial(texts.write_texts, held_out=2))
    quiet_libraries()
    record, steps = tmp_path / "record.json", 6
    small = ["--size", "tiny", "--text-bytes", "30000", "--set", "train.train_batch_size=1"]
    if family != "llama":
        config = converge_full.REPOSITORY / "train_configs" / f"{family}_full.yaml"
        small = [str(config), "--base", str(tiny_base(family)), "--blocks", "1,1"]
        sets = ours.write_data_set(family, tmp_path / "pictures", resolution=64, tokens=16)
        small += ["--set", f"data.sets=[{json.dumps(sets)}]", "--set", "data.max_sequence_length=32"]
        small += ["--set", "data.resolution=64", "--set", "validation.held_out=1"]
    given = ["--method", "full", *small, "--steps", str(steps), "--work", str(tmp_path)]
    code = converge.main([*given, "--record", str(record), "--month", "2026-11"])
    printed = capsys.readouterr()
    rows = {row["setting"]: row for row in map(json.loads, printed.out.splitlines())}
    assert list(rows) == list(converge_full.SETTINGS)
    for name, row in rows.items():
        assert row["steps"] == steps and row["proved"] and row["held_out"] > 0.0, row
        apart = "seed" in name or name == "bf16"
        assert set(row["gradients"]) == (set() if apart else set(records.STATES))
    # eager is what this CPU runs under both names
    assert rows["bf16 eager"]["gradients"]["trained"]["lowest"] == pytest.approx(1.0, abs=1e-5)
    assert rows["bf16 eager"]["most_apart"] == 0.0 < rows["fp8"]["most_apart"]
    fp8_rows = [row for name, row in rows.items() if name.startswith("fp8")]
    assert len(fp8_rows) == 2
    for row in fp8_rows:
        assert row["within_1_percent"] and row["band"] > 0.0
        assert all(0.9 < found["lowest"] < 1.0 for found in row["gradients"].values())
        assert 0.99 < row["alone"]["lowest"] < 1.0 and row["alone"]["tensors"] >= 14
        assert f"{row['setting']}: the last 6 steps' loss is" in printed.err
    assert code == (0 if all(map(records.holds, fp8_rows)) else 1)
    table = from_json(record.read_text(), "record")
    assert isinstance(table, Table) and table.curves is not None
    assert set(table.curves.losses) == set(rows) and table.curves.steps == 1
    assert families.get(family).title.split()[0] in table.text or "A Llama of 2 layers" in table.text
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("converge-")], "work is removed"
