"""Results that have learned nothing say why, and what to do about that."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.test_updater import gradients, parameters
from trainer.config.schema import TrainSection
from trainer.engine.optimizing.updater import Updater
from trainer.engine.results import proof
from trainer.engine.results.no_effect import NoEffectError, explained
from trainer.errors import ExitCode, Problem


def told(updater: Updater) -> Problem:
    with pytest.raises(NoEffectError) as caught, explained(updater):
        proof.require_effect(0.0, "nothing came of it", "runs/a")
    assert caught.value.exit_code is ExitCode.DIVERGED
    (problem,) = caught.value.problems
    assert problem.where == "runs/a" and problem.what.startswith("nothing came of it")
    return problem


def stepped(dtype: torch.dtype, kind: str = "adamw_fused_fp32", *, finite: bool = True) -> Updater:
    held = parameters(dtype)
    updater = Updater(held, TrainSection(learning_rate=1.0), kind)
    for number in range(2):
        gradients(held, number)
        if not finite:
            for parameter in held.values():
                assert parameter.grad is not None
                parameter.grad[0] = float("inf")
        updater.accumulate()
        updater.step(1.0, torch.tensor(1.0))
    return updater


def test_steps_that_all_overflowed_fp16_are_named_with_the_type_to_take() -> None:
    problem = told(stepped(torch.float16, finite=False))
    assert "none of the run's steps (2) was applied" in problem.what and "overflowed fp16" in problem.what
    assert problem.remedy.startswith("write model.dtype: bf16 where the GPU has it, else fp32")
    assert "learning_rate" not in problem.remedy


def test_prodigy_says_its_own_rate_and_does_not_ask_for_another() -> None:
    pytest.importorskip("prodigyopt")
    problem = told(stepped(torch.float32, "prodigy"))
    assert "prodigy's own estimate of the rate is" in problem.what
    assert "raise train.learning_rate" not in problem.remedy and "adamw" in problem.remedy


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_run_whose_steps_were_applied_is_to_train_more(dtype: torch.dtype) -> None:
    problem = told(stepped(dtype))
    assert problem.what == "nothing came of it" and problem.remedy == proof.TRAIN_MORE
