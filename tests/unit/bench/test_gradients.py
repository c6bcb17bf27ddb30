"""Gradients that `bench converge --method full` compares, beside autograd of the model of transformers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench import gradients, jobs
from bench.converge_full import REPOSITORY
from tests.emulated_fp8 import emulated
from tests.random_bases import byte_llama
from trainer.cli.measure import planned
from trainer.cli.options import Layers
from trainer.engine import run as engine
from trainer.engine.building import fp8
from trainer.engine.caching.samples import scan_samples
from trainer.engine.optimizing.split_adamw import decoded_first
from trainer.engine.records import checkpoint
from trainer.engine.spec import read_spec
from trainer.modeling.quiet import quiet_libraries

QUESTION, ANSWER = "Who is it?", "A fox, an owl and a frog on a green leaf."
CONFIG = REPOSITORY / "train_configs" / "llama_full.yaml"


def test_cosines_are_those_of_numpy(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    ours = {name: draw.normal(size=(5, 7)).astype(np.float32) for name in "ab"}
    theirs = {name: one + draw.normal(size=one.shape).astype(np.float32) for name, one in ours.items()}
    tensors = [{name: torch.from_numpy(one) for name, one in part.items()} for part in (ours, theirs)]
    zero = torch.zeros(3)
    save_file({**tensors[1], "none": zero, "gone": torch.ones(3)}, tmp_path / "x.safetensors")
    found = gradients.cosines_with(tmp_path / "x.safetensors", {**tensors[0], "none": zero, "gone": zero})
    for name in "ab":
        one, other = ours[name].ravel(), theirs[name].ravel()
        wanted = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
        assert found.pop(name) == pytest.approx(wanted, abs=1e-6)
    assert found == {"gone": 0.0}, "no direction in both is no verdict, and in one is none of the other's"
    with pytest.raises(AssertionError, match="in one alone"):
        gradients.cosines_with(tmp_path / "x.safetensors", {"a": zero})


class Made:
    """A tiny base with other weights beside it, one conversation, and runs of it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.folder, self.weights = folder, folder / "weights"
        byte_llama.build("tiny", folder / "base")
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "base")).bfloat16()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        self.model.save_pretrained(self.weights)
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        (folder / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")

    def job(self, name: str, *overrides: str, **plan: Any) -> str:
        """Path of the spec of a run, with changes of its plan."""
        folder = self.folder / name
        folder.mkdir()
        given = (
            f"model.pretrained_model_name_or_path={self.folder / 'base'}",
            "model.weights=random",
            "model.dtype=bf16",
            f"data.sets=[{{chat_file: {self.folder / 'chat.jsonl'}}}]",
            "data.max_sequence_length=112",
            "train.gradient_accumulation_steps=1",
            "train.lr_warmup_steps=0",
            "validation.prompts=[]",
            "validation.held_out=0",
            *overrides,
        )
        loaded = Layers((CONFIG,), given, None, folder / "run").load()
        changed = dataclasses.replace(planned(loaded, probe=False)[1], **plan)
        return str(jobs.write_job(loaded, changed, folder, self.folder / "cache"))

    def measure(self, spec: str, *, reference: bool, states: Sequence[str] = ("start", "trained")) -> Any:
        wanted = {
            name: {"step": 3, "weights": str(self.weights) if name == "trained" else ""} for name in states
        }
        kept = self.folder / "kept"
        kept.mkdir(exist_ok=True)
        return gradients.measure(spec, wanted, str(kept), reference)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setenv("TRAINER_PROFILE", "cpu")
    quiet_libraries()
    return Made(tmp_path)


def by_hand(model: Any, tokenizer: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in fp32: the answer's bytes and its end, each predicted from all before it."""
    marks = {name: f"<|start_header_id|>{name}<|end_header_id|>\n\n" for name in ("user", "assistant")}
    text = f"<|begin_of_text|>{marks['user']}{QUESTION}<|eot_id|>{marks['assistant']}{ANSWER}<|eot_id|>"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    learned = len(ANSWER.encode()) + 1
    logits = model.float()(input_ids=ids).logits[0, -learned - 1 : -1]
    loss = torch.nn.functional.cross_entropy(logits, ids[0, -learned:])
    loss.backward()
    return loss.item(), {name: one.grad for name, one in model.named_parameters()}


def test_gradients_are_those_of_autograd_at_the_given_weights(made: Made) -> None:
    from transformers import AutoTokenizer

    found = made.measure(made.job("bf16"), reference=True)
    loss, wanted = by_hand(made.model, AutoTokenizer.from_pretrained(made.folder / "base"))
    assert found["trained"]["loss"] == pytest.approx(loss, rel=5e-3)
    assert abs(found["start"]["loss"] / loss - 1) > 0.01, "other weights, another loss"
    cosines = gradients.cosines_with(made.folder / "kept" / "trained.safetensors", wanted)
    assert len(cosines) == len(wanted) == 21 and min(cosines.values()) > 0.999
    at_start = gradients.cosines_with(made.folder / "kept" / "start.safetensors", wanted)
    assert min(at_start.values()) < 0.9
    kept = load_file(made.folder / "kept" / "trained.safetensors")
    for name, gradient in wanted.items():  # before clipping: the norm too
        assert kept[name].float().norm() == pytest.approx(float(gradient.norm()), rel=0.02), name


def test_the_first_step_of_a_run_takes_them(made: Made) -> None:
    """Without decay the first moment after a step is the clipped gradient, in sixteen bits."""
    one_step = ("train.max_train_steps=1", "checkpoint.checkpointing_steps=1", "train.adam_beta1=0")
    made.measure(made.job("measured", *one_step), reference=True, states=["start"])
    path = made.job("trained", *one_step)
    context = jobs.make_context(path)
    engine.train(context, scan_samples(context.family, context.config), read_spec(Path(path)))
    folder = made.folder / "trained" / "run" / "checkpoints" / "step-000001"
    moments = {
        name.removesuffix("/exp_avg"): decoded_first(value)
        for name, value in checkpoint.read_group(folder, "optimizer", "cpu").items()
        if name.endswith("/exp_avg")
    }
    cosines = gradients.cosines_with(made.folder / "kept" / "start.safetensors", moments)
    assert len(cosines) == 21 and min(cosines.values()) > 0.99999


def test_fp8_is_compared_at_the_same_weights_and_samples(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_Products", emulated)
    bf16 = made.measure(made.job("bf16"), reference=True)
    assert made.measure(made.job("again"), reference=False)["trained"]["cosines"] == pytest.approx(
        dict.fromkeys(load_file(made.folder / "kept" / "trained.safetensors"), 1.0)
    )
    ours = made.measure(
        made.job("fp8", compute="fp8", weight_copies=2, weight_gradient="fp8"), reference=False
    )
    for state, found in ours.items():
        assert found["loss"] == pytest.approx(bf16[state]["loss"], rel=0.02)
        assert 0.95 < min(found["cosines"].values()) < 0.99999, state
        blocks = {name for name in found["cosines"] if "_proj." in name}
        assert found["alone"].keys() == blocks and len(blocks) == 14
        assert 0.998 < min(found["alone"].values()) < 1.0, "a layer's own rounding"
