"""Figures, verdicts and sentences of a comparison, against figures that are worked out by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench.record import from_json
from tests.unit.bench.test_bench import MACHINE
from tests.unit.comparing.conftest import Bench, variants_of
from trainer.engine.comparing import differences, plot, report, verdicts
from trainer.engine.comparing.rounds import Extent, Outcome
from trainer.engine.comparing.variants import varied
from trainer.errors import ConfigError
from trainer.telemetry import measurement

EXTENT = Extent(steps=4, warmup=2, rounds=2, learn=0)
RANKS = ("lora.rank=4", "lora.rank=8")


def test_speeds_are_of_the_timed_steps_of_all_rounds(bench: Bench) -> None:
    # two steps to warm up, then four
    bench.runs |= {
        # slow enough to be seen while they run
        "round-1-A": {"ms": [900, 900, 100, 101, 102, 103], "peak": 2**30, "slow": 0.2},
        "round-2-A": {"ms": [900, 900, 104, 105, 106, 107], "peak": 3 * 2**30, "slow": 0.2},
        "round-1-B": {"ms": [900, 900, 50, 51, 52, 53]},
        "round-2-B": {"ms": [900, 900, 54, 55, 56, 57]},
    }
    variants = variants_of(*RANKS)
    speeds = verdicts.speeds(variants, bench.compare(variants), 2)
    a, b = speeds["A"], speeds["B"]
    assert (a.times.median, a.times.fastest, a.times.slowest) == pytest.approx((103.5, 100, 107))
    assert a.times.round_medians == pytest.approx((101.5, 105.5)) and a.times.steps == 8
    assert a.allocated_gib == 3.0 and b.allocated_gib is None and a.faster is None
    assert b.faster is not None and b.faster.value == pytest.approx(103.5 / 53.5)
    assert b.faster.tells_apart and b.faster.low < 103.5 / 53.5 < b.faster.high
    assert len(a.first_step_seconds) == 2


def test_equal_steps_are_no_difference(bench: Bench) -> None:
    bench.runs["round"] = {"ms": [100, 108, 104, 97, 99, 103]}
    variants = variants_of(*RANKS)
    outcome = bench.compare(variants)
    cells = report.figures_by_name(variants, outcome, EXTENT)
    assert cells["as fast as A"][0] == "" and cells["as fast as A"][1].startswith("no difference (95 %: 0.9")


def test_one_step_a_run_has_no_interval(bench: Bench) -> None:
    bench.runs |= {"-A": {"ms": [100, 108, 104]}, "-B": {"ms": [100, 108, 52]}}
    variants, extent = variants_of(*RANKS), Extent(steps=1, warmup=2, rounds=2, learn=0)
    outcome = bench.compare(variants, steps=1)
    assert report.figures_by_name(variants, outcome, extent)["as fast as A"][1] == "2.000 times (no interval)"
    said = "one step of each run: nothing is known of how steps vary, --steps 2 or more tell"
    assert said in report.notes(variants, outcome, extent)
    two = bench.compare(variants, warmup=1, steps=2)
    assert (
        "95 %"
        in report.figures_by_name(variants, two, dataclasses.replace(extent, warmup=1))["as fast as A"][1]
    )
    assert said not in report.notes(variants, two, dataclasses.replace(extent, warmup=1, steps=2))


def test_without_rounds_the_runs_that_learn_are_counted_as_what_is_timed(bench: Bench) -> None:
    variants, extent = variants_of(*RANKS), Extent(steps=30, warmup=2, rounds=0, learn=7)
    outcome = bench.compare(variants, rounds=0, learn=7)
    first, second, *_ = report.notes(variants, outcome, extent)
    assert first == "no rounds, times are of the runs that learn: 5 steps each after 2 that are not timed"
    assert second.startswith("1 run of each")


def test_a_step_of_more_samples_is_compared_by_samples(bench: Bench) -> None:
    bench.runs |= {"-A": {"ms": [100], "samples": 2}, "-B": {"ms": [150], "samples": 4}}
    variants = variants_of("train.train_batch_size=2", "train.train_batch_size=4")
    outcome = bench.compare(variants)
    found = verdicts.speeds(variants, outcome, 2)["B"]
    assert found.faster is not None and found.faster.value == pytest.approx(2 / 1.5)
    assert any("2.000 times the samples" in text for text in report.notes(variants, outcome, EXTENT))


def test_steps_of_a_run_that_was_stopped_count_and_its_round_does_not(bench: Bench) -> None:
    bench.runs |= {"-A": {"ms": [100]}, "-B": {"ms": [50]}, "round-2-B": {"ms": [70], "end": (5, 75)}}
    variants = variants_of(*RANKS)
    outcome = bench.compare(variants)
    found = verdicts.speeds(variants, outcome, 2)
    assert found["B"].times.steps == 4 + 3 and found["B"].times.round_medians == pytest.approx((50, 70))
    assert "1 of 2 rounds" in " ".join(report.notes(variants, outcome, EXTENT))


def test_nothing_that_is_timed_is_no_table(bench: Bench) -> None:
    bench.runs["round-1-A"] = {"end": (2, 71)}
    variants = variants_of(*RANKS)
    outcome = bench.compare(variants)
    lines = report.lines(variants, outcome, EXTENT)
    assert outcome.has_steps and not any("lora.rank" in line for line in lines)
    assert lines[-1] == "not all runs were made: round 1, A ended with exit code 71"


LOSSES = [2.0 - 0.01 * step for step in range(100)]


@pytest.mark.parametrize(
    ("factor", "seed_factor", "verdict"),
    [
        (1.009, 1.0, "learns the same: last 50 losses +0.90%, within 1.0%"),
        (1.03, 1.0, "learns worse: last 50 losses +3.00%, not within 1.0%"),
        (0.95, 1.0, "learns more: last 50 losses -5.00%, not within 1.0%"),
        (1.03, 1.08, "learns the same: last 50 losses +3.00%, within 4.0%"),
        (1.03, 0.96, "learns worse: last 50 losses +3.00%, not within 2.0%"),
    ],
)
def test_learning_is_judged_by_one_percent_or_half_the_seeds_band(
    bench: Bench, factor: float, seed_factor: float, verdict: str
) -> None:
    bench.runs |= {
        "learn": {"losses": LOSSES},
        "learn-B": {"loss_factor": factor},
        "another-seed": {"loss_factor": seed_factor},
    }
    variants = variants_of(*RANKS)
    outcome = bench.compare(variants, rounds=0, learn=100)
    found = verdicts.learned(outcome)["B"]
    assert found.verdict == verdict
    assert found.mean_apart == pytest.approx(abs(factor - 1), abs=1e-5)
    assert found.band == pytest.approx(abs(seed_factor - 1), abs=1e-4)


def test_losses_are_paired_by_step_where_fp16_overflowed(bench: Bench) -> None:
    """A step that was skipped has no loss: neither what comes behind it is left out, nor is it moved."""
    falling = [8.0, 4.0, 2.0, 1.0]
    bench.runs |= {"learn": {"losses": falling}, "learn-B": {"losses": [8.0, None, 2.0, 1.0]}}
    variants = variants_of(*RANKS)
    outcome = bench.compare(variants, rounds=0, learn=4)
    found = verdicts.learned(outcome)["B"]
    assert (found.steps, found.mean_apart, found.last_ratio, found.band) == (3, 0.0, 1.0, 0.0)
    table = report.table_of(
        variants, outcome, Extent(steps=4, warmup=2, rounds=0, learn=4), machine=MACHINE, command=""
    )
    assert json.loads(measurement.to_json(table))["curves"]["losses"]["B lora.rank=8"] == [8.0, 8.0, 2.0, 1.0]


def test_a_first_variant_that_learned_everything_has_a_verdict(bench: Bench) -> None:
    bench.runs |= {"learn": {"losses": [1.0, 0.0]}, "learn-B": {"losses": [1.0, 0.0]}}
    variants = variants_of(*RANKS)
    assert verdicts.learned(bench.compare(variants, rounds=0, learn=4))["B"].mean_apart == 0.0
    bench.runs |= {"learn-A": {"losses": [0.0]}, "learn-B": {"losses": [0.5]}}
    worse = verdicts.learned(bench.compare(variants, rounds=0, learn=4))["B"]
    assert worse.verdict.startswith("learns worse")


def test_without_the_other_seed_one_percent_is_the_bound(bench: Bench) -> None:
    bench.runs |= {"learn-B": {"loss_factor": 1.03}, "another-seed": {"end": (3, 71)}}
    variants = variants_of(*RANKS)
    outcome = bench.compare(variants, rounds=0, learn=60)
    assert outcome.code == 71 and verdicts.learned(outcome)["B"].band is None
    assert verdicts.learned(outcome)["B"].verdict.startswith("learns worse")


def test_the_plans_differences_are_said_first_and_not_called_one_changes() -> None:
    """FP8 with blocks recomputed as well: the ratio is not FP8's."""
    more = "features.compute=fp8 features.activation_checkpointing=32"
    variants = variants_of(
        "features.compute=bf16 features.activation_checkpointing=false", more,
        config="llama_full.yaml", machine="h200.json",
    )  # fmt: skip
    first, second, third = differences.sentences(variants)
    assert first.startswith("A and B: the plans differ in compute (bf16, fp8)")
    assert " and recomputed blocks (none, " in first and "with weight_copies and weight_gradient" in first
    assert second.strip() == "a ratio is that of all of these together, and not compute's alone"
    assert "features.compute (bf16, fp8)" in third and "weight_gradient" not in third


def test_one_change_of_the_plan_is_called_by_its_name() -> None:
    both = "features.activation_checkpointing=false"
    variants = variants_of(
        f"features.compute=bf16 {both}", f"features.compute=fp8 {both}", config="llama_full.yaml",
        machine="h200.json",
    )  # fmt: skip
    lines = differences.sentences(variants)
    assert "all of these" not in " ".join(lines) and "the plans differ in compute (bf16, fp8)" in lines[0]


def test_equal_plans_of_other_settings_are_told() -> None:
    lines = differences.sentences(variants_of(*RANKS))
    assert lines == ["A and B: the plans are equal", "  the configurations differ in lora.rank (4, 8)"]


def test_data_sets_are_told_by_what_is_written_of_them() -> None:
    one, two = variants_of('data.sets=[{"img_dir":"a"}]', 'data.sets=[{"img_dir":"b"}]')
    assert differences.sentences([one, two])[1] == (
        "  the configurations differ in data.sets ([{'img_dir': 'a'}], [{'img_dir': 'b'}])"
    )


def test_values_of_vary() -> None:
    assert varied(["lora.rank=4,8"]) == [("lora.rank=4",), ("lora.rank=8",)]
    assert varied(["a.b=[1,2],[3]", "c=x, y"]) == [("a.b=[1,2]", "c=x"), ("a.b=[3]", "c=y")]
    for wrong in (["lora.rank"], ["lora.rank=4"], ["lora.rank=4,"], ["a=1,2", "b=1,2,3"], ["output_dir=a,b"]):
        with pytest.raises(ConfigError):
            varied(wrong)


def test_the_record_is_one_that_the_page_of_measurements_shows(bench: Bench, tmp_path: Path) -> None:
    from bench import page

    bench.runs |= {"-B": {"ms": [80, 82]}}
    variants = variants_of(*RANKS)
    outcome = bench.compare(variants, learn=60)
    extent = Extent(steps=4, warmup=2, rounds=2, learn=60)
    table = report.table_of(variants, outcome, extent, machine=MACHINE, command="trainer compare a.yaml")
    text = measurement.to_json(table)
    again = from_json(text, "record")
    assert again == table and str(tmp_path) not in text
    shown = page.page({"x": again}, f"notes\n{page.MARK}\n")
    assert "B lora.rank=8" in shown and "1.2" in shown and "A and B: the plans are equal." in shown
    assert json.loads(text)["curves"]["losses"].keys() == {"A lora.rank=4", "B lora.rank=8"}


def test_the_picture_has_losses_and_strips(bench: Bench, tmp_path: Path) -> None:
    from PIL import Image

    bench.runs |= {"learn": {"losses": LOSSES}, "-B": {"ms": [80, 82]}, "seed": {"loss_factor": 1.1}}
    variants = variants_of(*RANKS)
    outcome = bench.compare(variants, learn=60)
    plot.write_plot(variants, outcome, 2, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size[0] == 1200
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}  # type: ignore[union-attr]
    # blue, red and the grey of another seed, by the colours of `trainer runs --plot`
    assert {(9, 105, 218), (207, 34, 46), (175, 184, 193)} <= colours


def test_fewer_losses_than_fifty_are_counted(bench: Bench) -> None:
    bench.runs |= {"learn": {"losses": LOSSES[:12]}}
    variants, extent = variants_of(*RANKS), Extent(steps=4, warmup=2, rounds=2, learn=12)
    outcome = bench.compare(variants, learn=12)
    assert "last 12 losses, of A's" in report.figures_by_name(variants, outcome, extent)
    (said,) = (one for one in report.notes(variants, outcome, extent) if one.startswith("another seed"))
    assert "its last 12 losses are" in said


def test_steps_of_few_are_counted_in_whole_ones(bench: Bench) -> None:
    from matplotlib.figure import Figure

    bench.runs |= {"learn": {"losses": LOSSES}}
    variants = variants_of(*RANKS)
    axes = Figure().subplots()
    plot._draw_losses(axes, variants, bench.compare(variants, learn=20))
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


@pytest.mark.parametrize(("learn", "told"), [(50, True), (500, False), (0, False)])
def test_a_warm_up_as_long_as_the_runs_that_learn_is_told(learn: int, told: bool) -> None:
    variants = variants_of("train.lr_warmup_steps=100 train.max_train_steps=1000", "train.seed=1")
    extent = dataclasses.replace(EXTENT, learn=learn)
    found = [one for one in report.notes(variants, Outcome(), extent) if "lr_warmup_steps is 100" in one]
    assert bool(found) == told
