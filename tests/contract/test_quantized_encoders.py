"""Captions encoded by quantised text encoders have entries of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tests.contract.runs import LORA_CASES, Case, Job, Workshop, draws
from trainer.engine.caching.entries import _parts as parts_of
from trainer.engine.caching.entries import list_entries
from trainer.engine.caching.fill import fill_cache

CASES = [case for case in LORA_CASES if draws(case.family)]


def stored(job: Job, kind: str) -> Job:
    """The same job with its plan's text encoders stored as `kind`."""
    plan = dataclasses.replace(job.context.plan, text_encoder_weights=kind)
    return dataclasses.replace(job, context=dataclasses.replace(job.context, plan=plan))


def parts_in(job: Job, dtype: str, kind: str) -> dict[str, str]:
    """The parts of text entries' keys in this type, with encoders stored as `kind`."""
    plan = dataclasses.replace(job.context.plan, dtype=dtype, text_encoder_weights=kind)
    return parts_of(dataclasses.replace(job.context, plan=plan), "text")


@pytest.mark.parametrize("case", CASES[:1], ids=str)
def test_entries_of_fp16_encoders_that_overflowed_are_not_taken(
    case: Case, workshop: Workshop, tmp_path: Path
) -> None:
    """They were finite and wrong; all other keys are as they were."""
    job = workshop.job(case, tmp_path, "validation.prompts=[]")
    assert not job.context.source.random_components
    assert parts_in(job, "fp16", "int8")["kept_in_fp32"] == "yes"
    for dtype, kind in (("fp16", "fp16"), ("bf16", "int8"), ("fp32", "nf4")):
        assert "kept_in_fp32" not in parts_in(job, dtype, kind)


@pytest.mark.parametrize("case", CASES[:1], ids=str)
def test_entries_of_quantised_encoders_are_not_taken_for_others(
    case: Case, workshop: Workshop, tmp_path: Path
) -> None:
    job = workshop.job(case, tmp_path, "validation.prompts=[]")
    assert job.context.plan.text_encoder_weights == job.context.plan.dtype
    plain, *quantized = (
        list_entries(one.context, one.records, one.samples.prompt_controls)
        for one in (job, stored(job, "int8"), stored(job, "nf4"))
    )
    texts = [{entry.key for entry in (*one.texts, *one.empties)} for one in (plain, *quantized)]
    assert len(set.union(*texts)) == sum(map(len, texts))
    assert all(one.latents == plain.latents for one in quantized)
    fill_cache(job.context, plain)
    fill_cache(stored(job, "int8").context, quantized[0])
    first, again = (one.cache.read("text", one.texts[0].key) for one in (plain, quantized[0]))
    assert first.keys() == again.keys()
    for name, value in first.items():
        assert not torch.equal(again[name], value)
        assert torch.allclose(again[name], value, atol=0.1 * float(value.abs().max()))
