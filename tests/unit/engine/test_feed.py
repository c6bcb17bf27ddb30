"""The feed: what threads and memory make faster must change neither batches nor draws nor errors."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling

from trainer.config.schema import FlowSection
from trainer.engine.caching.batches import load_batch
from trainer.engine.caching.entries import Entries, LatentsEntry, TextEntry
from trainer.engine.caching.store import Cache, DamagedEntryError, entry_key
from trainer.engine.ranks import ALONE
from trainer.engine.training import feed
from trainer.errors import ConfigError, ExitCode, OutOfMemoryError, StoppedError
from trainer.families import draws, get
from trainer.families.draws import FlowSettings, draw_samples, sample_seed
from trainer.telemetry.status import Phase
from trainer.telemetry.stop import StopFlag

SAMPLES, BATCH, ACCUMULATION = 23, 2, 2
SETTINGS = FlowSettings(
    sigmas=torch.linspace(1.0, 0.001, 1001),
    flow=FlowSection(),
    seed=5,
    scheduler={"use_dynamic_shifting": False},
)


def key(kind: str, name: object) -> str:
    return entry_key(kind, {"name": str(name)})


@pytest.fixture
def entries(tmp_path: Path) -> Entries:
    cache = Cache(tmp_path, "flux1_dev")
    for number in range(SAMPLES):
        mean, std = torch.randn(2, 4, 6, 8 if number % 3 else 10).unbind()
        cache.write("latents", key("latents", number), {"mean": mean, "std": std})
    for name in [*range(SAMPLES), ""]:
        text = {"prompt_embeds": torch.randn(3, 5), "pooled_prompt_embeds": torch.randn(7)}
        cache.write("text", key("text", name), text)
    plain = {"repeats": 1, "mask": None, "loss_weight": 1.0}
    records: Any = [SimpleNamespace(**plain, content_sha256=str(number)) for number in range(SAMPLES)]
    return Entries(
        cache=cache,
        records=tuple(records),
        texts=tuple(TextEntry(key=key("text", n), caption=str(n)) for n in range(SAMPLES)),
        empties=(TextEntry(key=key("text", ""), caption=""),) * SAMPLES,
        latents=tuple(LatentsEntry(key=key("latents", n), record=records[n]) for n in range(SAMPLES)),
        prompts=(),
        masked=False,
        weighted=False,
    )


@pytest.fixture
def context() -> Any:
    train = SimpleNamespace(seed=5)
    data = SimpleNamespace(caption_dropout_rate=0.3, cache_in_memory="auto")
    beats: list[tuple[Phase, int, int]] = []

    def beat(phase: Phase, *, step: int, total: int) -> None:
        beats.append((phase, step, total))

    return SimpleNamespace(
        family=get("flux1_dev"),
        status=SimpleNamespace(beat=beat, beats=beats),
        stop=StopFlag(),
        say=lambda text: None,
        dtype=torch.bfloat16,
        ranks=ALONE,
        config=SimpleNamespace(train=train, data=data),
        plan=SimpleNamespace(
            pin_memory=False,
            text_padding=False,
            in_rows=False,
            keep_bytes=2**30,
            micro_batch_size=BATCH,
            accumulation_steps=ACCUMULATION,
        ),
    )


def values(batch: Any, draw: Any) -> dict[str, torch.Tensor]:
    return {**batch.latents, **batch.text, **vars(draw)}


def one_by_one(context: Any, entries: Entries, start: int, stop: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches that the feed must give, computed without threads and memory."""
    sampler = feed.make_sampler(context, entries)
    for number in range(start, stop):
        for samples in sampler.step(number):
            pairs = [(sample.record, sample.dropped) for sample in samples]
            batch = load_batch(context, entries, pairs, pin_memory=False)
            size = batch.latents["mean"].shape[1:]
            yield values(batch, draw_samples(SETTINGS, [sample.position for sample in samples], size))


@pytest.mark.parametrize("room", [0, 20_000, 10**9])
@pytest.mark.parametrize("start", [0, 3])
def test_batches_are_those_of_the_stream(
    context: Any, entries: Entries, start: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches keep the stream's order over several epochs, however much room there is for entries."""
    monkeypatch.setattr(feed, "keep_bytes", lambda context, entries: room)
    expected = list(one_by_one(context, entries, start, 25))
    steps = list(feed.feed(context, entries, SETTINGS, start, 25))
    assert {sum(fed.batch.size for fed in step) for step in steps} == {BATCH * ACCUMULATION}
    # two shapes, two at once: two micro-batches or three
    assert {len(step) for step in steps} == {2, 3}
    found = [values(fed.batch, fed.draw) for step in steps for fed in step]
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) and got[name].dtype == want[name].dtype for name in got)


def test_steps_that_are_passed_over_beat_and_may_be_stopped(
    context: Any, entries: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a language model's large steps a replay takes minutes."""
    monkeypatch.setattr(feed, "_REPLAYED", 10)
    expected = next(one_by_one(context, entries, 25, 26))
    first = next(feed.feed(context, entries, SETTINGS, 25, 26))[0]
    assert all(torch.equal(value, expected[name]) for name, value in values(first.batch, first.draw).items())
    assert context.status.beats == [(Phase.FIRST_STEP, 25, 26)] * 3
    context.stop.requested = ExitCode.STOPPED
    with pytest.raises(StoppedError):
        next(feed.feed(context, entries, SETTINGS, 25, 26))


def test_copies_of_a_picture_do_not_meet_in_a_step(context: Any, entries: Entries) -> None:
    records: Any = [SimpleNamespace(repeats=1, content_sha256=str(number // 2)) for number in range(SAMPLES)]
    sampler = feed.make_sampler(context, dataclasses.replace(entries, records=tuple(records)))
    for step in map(sampler.step, range(40)):
        shown = [records[sample.record].content_sha256 for part in step for sample in part]
        assert len(set(shown)) == len(shown) == BATCH * ACCUMULATION


def test_entries_with_room_are_read_once(context: Any, entries: Entries) -> None:
    batches = feed.feed(context, entries, SETTINGS, 0, 100)
    for _ in range(50):
        next(batches)
    for number in range(SAMPLES):
        entries.cache.path("latents", key("latents", number)).unlink()
    assert len(list(batches)) == 50


def test_an_error_is_raised_in_its_steps_turn(context: Any, entries: Entries) -> None:
    sampler = feed.make_sampler(context, entries)
    firsts = {sample.record: n for n in reversed(range(5)) for part in sampler.step(n) for sample in part}
    record = max(firsts, key=firsts.__getitem__)
    path = entries.cache.path("latents", entries.latents[record].key)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    taken = 0
    with pytest.raises(DamagedEntryError):
        for _ in feed.feed(context, entries, SETTINGS, 0, 20):
            taken += 1
    assert taken == firsts[record] > 0
    assert not feeding()


def test_closing_ends_the_threads(context: Any, entries: Entries) -> None:
    batches = feed.feed(context, entries, SETTINGS, 0, 10_000)
    next(batches)
    assert feeding()
    batches.close()
    assert not feeding()


def feeding() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("feed")]


def test_room_is_what_the_plan_has(context: Any, entries: Entries) -> None:
    for room in (0, 1125):
        context.plan.keep_bytes = room
        assert feed.keep_bytes(context, entries) == room


def test_all_entries_stay_in_memory_where_that_is_asked_for(context: Any, entries: Entries) -> None:
    context.config.data.cache_in_memory = True
    room = feed.keep_bytes(context, entries)
    cache = Cache(entries.cache.directory, "flux1_dev", keep_bytes=room)
    wanted = {(entry.kind, entry.key) for entry in entries.all()}
    for kind, name in wanted:
        cache.read(kind, name)
        cache.path(kind, name).unlink()
    assert all(cache.read(kind, name) for kind, name in wanted)


def test_entries_that_cannot_all_stay_are_refused(context: Any, entries: Entries) -> None:
    context.config.data.cache_in_memory = True
    context.plan.keep_bytes = 9000
    with pytest.raises(OutOfMemoryError, match=r"all entries .* GiB for them") as caught:
        feed.keep_bytes(context, entries)
    assert caught.value.problems[0].where == "data.cache_in_memory"


@pytest.mark.parametrize("shape", [(4, 4, 4), (3, 5, 7), (1, 1, 3)])
@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "logit_normal", "mode", "cosmap"])
def test_a_draw_is_that_of_the_samples_own_generator(scheme: Any, shape: tuple[int, ...]) -> None:
    settings = dataclasses.replace(SETTINGS, flow=FlowSection(weighting_scheme=scheme), seed=9)
    positions = [7, 0, 1_000_003]
    draw = draw_samples(settings, positions, shape)
    for row, position in enumerate(positions):
        generator = torch.Generator().manual_seed(sample_seed(9, position))
        options = {"weighting_scheme": scheme, "batch_size": 1, "logit_mean": 0.0, "logit_std": 1.0}
        density = compute_density_for_timestep_sampling(**options, mode_scale=1.29, generator=generator)
        assert draw.sigma[row] == settings.sigmas[int(density.item() * 1001)]
        assert torch.equal(draw.noise[row], torch.randn(shape, generator=generator))
        assert torch.equal(draw.vae_noise[row], torch.randn(shape, generator=generator))


@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "logit_normal", "mode", "cosmap"])
def test_held_out_draws_are_other_draws_spread_over_what_training_draws(scheme: Any) -> None:
    """Four draws for each of eight samples, against ten thousand draws by diffusers."""
    section = FlowSection(weighting_scheme=scheme, logit_mean=0.5, logit_std=0.8)
    settings = dataclasses.replace(SETTINGS, flow=section)
    held_out = dataclasses.replace(settings, measured_draws=4)
    measured = draw_samples(held_out, range(32), (4, 4, 4))
    trained = draw_samples(settings, range(32), (4, 4, 4))
    assert not any(torch.equal(one, two) for one in measured.noise for two in trained.noise)
    assert not torch.equal(measured.vae_noise, trained.vae_noise)
    usual = {"logit_mean": 0.5, "logit_std": 0.8, "mode_scale": 1.29}
    generator = torch.Generator().manual_seed(0)
    density = compute_density_for_timestep_sampling(scheme, 10_000, **usual, generator=generator)
    sigmas = settings.sigmas[(density * 1001).long().clamp(max=1000)].sort().values
    # where each lies among those of training: a quarter apart, and evenly over all samples
    ranks = torch.searchsorted(sigmas, measured.sigma) / 10_000
    for sample in ranks.view(8, 4):
        assert (sample.sort().values.diff() - 0.25).abs().max() < 0.03
    gaps = ranks.sort().values.diff()
    assert gaps.max() < 0.08
    again = draw_samples(held_out, range(32), (4, 4, 4))
    assert torch.equal(again.sigma, measured.sigma) and torch.equal(again.noise, measured.noise)


@pytest.mark.parametrize("dynamic", [True, False])
def test_shifted_noise_levels_are_the_schedulers(dynamic: bool) -> None:
    """A static shift, and the dynamic one that the pipeline gives at 4,096 image tokens."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    latents = {"mean": (4, 128, 128)}
    plain = draws.draw(SETTINGS, range(8), latents).sigma
    if dynamic:
        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        expected = scheduler.time_shift(1.15, 1.0, plain)
        section = FlowSection(shift="resolution")
        settings = dataclasses.replace(SETTINGS, flow=section, scheduler=dict(scheduler.config))
    else:
        expected = 3.0 * plain / (1 + 2.0 * plain)
        settings = dataclasses.replace(SETTINGS, flow=FlowSection(shift=3.0))
    shifted = draws.draw(settings, range(8), latents).sigma
    assert torch.allclose(shifted, expected, rtol=1e-6)
    assert (shifted > plain).all()


@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 2, 4, 5)])
def test_each_sample_is_noised_by_its_own_level(shape: tuple[int, ...]) -> None:
    """Samples are as many as channels, so that a level for each channel would fit as well."""
    draw = draw_samples(SETTINGS, range(3), shape)
    clean = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    found = draws.interpolate(clean, draw)
    for number in range(3):
        wanted = torch.lerp(clean[number], draw.noise[number], draw.sigma[number])
        torch.testing.assert_close(found[number], wanted, rtol=1e-5, atol=1e-6)


def test_a_base_without_a_dynamic_shift_is_told() -> None:
    settings = dataclasses.replace(SETTINGS, flow=FlowSection(shift="resolution"))
    with pytest.raises(ConfigError, match="no shift that depends on the resolution"):
        draws.draw(settings, [0], {"mean": (4, 6, 8)})


def test_a_run_says_what_its_steps_make(context: Any, entries: Entries) -> None:
    sampler = feed.make_sampler(context, entries)
    steps = [[len(one) for one in sampler.step(n)] for n in range(50)]
    made = sum(map(len, steps)) / 50
    assert 2 < made < 4 and {size for step in steps for size in step} == {1, 2}
    assert feed.parted(sampler, 50).endswith(f"{made:.1f} micro-batches a step, of 1 to 2 samples")


@pytest.mark.parametrize(
    ("size", "words"), [(1, "2.0 micro-batches a step, of 1 sample"), (3, "of 3 samples")]
)
def test_micro_batches_of_one_size_are_told_by_it(size: int, words: str) -> None:
    for rows in (4, 10_000):  # one step is counted, however many samples it has
        sampler: Any = SimpleNamespace(rows=rows, step=lambda number: [range(size), range(size)])
        assert feed.parted(sampler, 5).endswith(words)


@pytest.mark.parametrize(("size", "lines"), [(1, 0), (2, 1)])
def test_what_samples_are_computed_together_is_told_where_several_may_be(
    context: Any, entries: Entries, size: int, lines: int
) -> None:
    said: list[str] = []
    context.say, context.plan.micro_batch_size = said.append, size
    list(feed.feed(context, entries, SETTINGS, 0, 2))
    assert len([line for line in said if "computed together" in line]) == len(said) == lines


def test_sizes_that_differ_are_those_of_the_entries(context: Any, entries: Entries) -> None:
    """Blocks are compiled for them: a size too few makes the compiler begin anew in the middle of a run."""
    context.plan.compile = True
    assert feed.varies(context, entries) == ("wide", "tall", "batch")
    context.plan.micro_batch_size = 1
    assert feed.varies(context, entries) == ("wide", "tall")
    few = {name: getattr(entries, name)[:1] for name in ("records", "texts", "empties", "latents")}
    assert feed.varies(context, dataclasses.replace(entries, **few)) == ()
    context.family, longer = get("qwen_image"), with_captions(entries)
    assert feed.varies(context, longer) == ("wide", "tall", "text")
    context.plan.text_padding = True
    assert feed.varies(context, longer) == ("wide", "tall")
    context.plan.compile = False
    assert feed.varies(context, longer) == ()


def with_captions(entries: Entries) -> Entries:
    """Entries whose captions have 1 to 23 tokens."""
    for number in range(SAMPLES):
        text = {"prompt_embeds": torch.randn(number + 1, 5), "pooled_prompt_embeds": torch.randn(7)}
        entries.cache.write("text", key("text", f"of {number}"), text)
    texts = tuple(TextEntry(key=key("text", f"of {n}"), caption=str(n)) for n in range(SAMPLES))
    return dataclasses.replace(entries, texts=texts)


def test_captions_of_any_length_are_computed_together_where_they_are_padded(
    context: Any, entries: Entries
) -> None:
    """Pictures of two shapes: a step of four is two micro-batches, or three."""
    context.family, entries = get("qwen_image"), with_captions(entries)
    made = {}
    for padded in (False, True):
        context.plan.text_padding = padded
        sampler = feed.make_sampler(context, entries)
        made[padded] = [len(sampler.step(n)) for n in range(30)]
    assert max(made[True]) <= 3 and min(made[True]) == 2
    assert sum(made[False]) > sum(made[True])


@pytest.fixture
def chats(context: Any, tmp_path: Path) -> Entries:
    """Conversations of 3 to 25 tokens for rows of 60, two at once: `context` is of a language model."""
    context.family = get("llama")
    context.config.data = SimpleNamespace(
        caption_dropout_rate=0.0, cache_in_memory="auto", max_sequence_length=60
    )
    context.plan.compile = True
    cache = Cache(tmp_path, "llama")
    for number in range(SAMPLES):
        ids = torch.arange(1, number + 4)
        cache.write("text", key("text", number), {"input_ids": ids, "loss_weight": (ids > 1).float()})
    records: Any = [
        SimpleNamespace(repeats=1, loss_weight=1.0, content_sha256=str(n)) for n in range(SAMPLES)
    ]
    return Entries(
        cache=cache,
        records=tuple(records),
        texts=tuple(TextEntry(key=key("text", n), caption=str(n)) for n in range(SAMPLES)),
        empties=(),
        latents=(),
        prompts=(),
        masked=False,
        weighted=False,
    )


def test_padded_rows_are_of_one_length_and_count_what_rows_as_they_come_count(
    context: Any, chats: Entries
) -> None:
    """Rows of 60 are padded to 64, two of which are one: the step's tokens and weights are the real ones."""
    said: list[str] = []
    context.say = said.append
    plain = [fed for step in feed.feed(context, chats, None, 0, 6) for fed in step]
    assert not any("padded" in line for line in said) and feed.varies(context, chats) == ("text",)
    context.plan.text_padding = True
    padded = [fed for step in feed.feed(context, chats, None, 0, 6) for fed in step]
    assert feed.varies(context, chats) == ()
    real = 0
    for one, other in zip(plain, padded, strict=True):
        assert one.batch is not None and other.batch is not None
        assert (one.micro_batch, one.weight, one.tokens) == (other.micro_batch, other.weight, other.tokens)
        ids = one.batch.text["input_ids"]
        assert other.batch.text["input_ids"].shape == (1, 128) and ids.shape == (1, one.tokens)
        assert torch.equal(other.batch.text["input_ids"][:, : one.tokens], ids)
        real += one.tokens
    share = 1 - real / (128 * len(padded))
    assert 0.06 < share < 0.3, "at least the four tokens that rows are shorter"
    assert said[-1] == f"rows are padded to 128 tokens: {share:.1%} of them is padding in the first 6 steps"


def test_noise_levels_beyond_what_exp_has_are_those_at_the_end() -> None:
    section = FlowSection(weighting_scheme="logit_normal", logit_mean=0.0, logit_std=1e4)
    settings = dataclasses.replace(SETTINGS, flow=section, measured_draws=4)
    measured = draw_samples(settings, range(8), (4, 4, 4)).sigma
    ends = [float(settings.sigmas[-1]), float(settings.sigmas[0])]
    assert measured.sort().values.tolist() == [end for end in ends for _ in range(4)]
