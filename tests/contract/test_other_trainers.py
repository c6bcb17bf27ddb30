"""Whole runs beside what others make of the same samples: transformers' Trainer for language models, and for
pictures the loop of the diffusers examples, of peft, torch and diffusers' scheduler.

Theirs start from the same adapter, which peft wrote, and take the same samples in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.optimization import get_scheduler
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

from tests.contract.loaders import lora_file
from tests.contract.runs import (
    CASES,
    Case,
    Job,
    Step,
    Workshop,
    draws,
    numbers,
    record_samples,
    require_near,
)
from trainer import families
from trainer.engine.training import feed, loop
from trainer.families.values import Batch, Draw

STEPS, RATE, DECAY, MOST_NORM, ACCUMULATION = 4, 2e-3, 0.1, 0.01, 3
BETAS = (0.9, 0.99)
OPTIONS = (
    "validation.prompts=[]",
    "validation.held_out=0",
    f"train.max_train_steps={STEPS}",
    "train.lr_scheduler=cosine",
    "train.log_every_steps=1",
    f"train.learning_rate={RATE}",
    "train.adam_beta2=0.99",
    f"train.weight_decay={DECAY}",
    f"train.max_grad_norm={MOST_NORM}",
    f"train.gradient_accumulation_steps={ACCUMULATION}",
)
"""Every gradient is clipped, and the decay shows within a few steps."""
WRITERS = tuple(case for case in CASES if not draws(case.family))
DRAWERS = tuple(case for case in CASES if draws(case.family))


def grow(model: Any) -> None:
    """Have an adapter that was just made change something."""
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)


class Rows(Trainer):
    """transformers' Trainer over given batches in their order."""

    batches: Sequence[Mapping[str, torch.Tensor]]

    def get_train_dataloader(self) -> Any:
        """The batches as they are."""
        return DataLoader(list(self.batches), batch_size=None, shuffle=False)  # type: ignore[arg-type]


def conversations_of(job: Job, taken: Sequence[Step]) -> Iterator[dict[str, torch.Tensor]]:
    """A batch for each packed row: its conversations beside each other, padded on the right."""
    base = str(job.context.config.model.pretrained_model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    lines = Path(job.context.config.data.sets[0].chat_file or "").read_text().splitlines()
    for row in (row for step in taken for row in step):
        found: dict[str, list[torch.Tensor]] = {"input_ids": [], "labels": [], "attention_mask": []}
        for sample in row:
            messages = json.loads(lines[sample.record])["messages"]
            # what follows the prompt is learned, to the mark that ends the answer
            whole, asked = (
                tokenizer.apply_chat_template(
                    some, add_generation_prompt=more, return_tensors="pt", return_dict=True
                )["input_ids"][0]
                for some, more in ((messages, False), (messages[:1], True))
            )
            found["input_ids"].append(whole)
            end = int((whole == tokenizer.eos_token_id).nonzero()[-1]) + 1
            labels = whole.clone()
            labels[: len(asked)] = labels[end:] = -100
            found["labels"].append(labels)
            found["attention_mask"].append(torch.ones_like(whole))
        yield {
            name: torch.nn.utils.rnn.pad_sequence(
                some, batch_first=True, padding_value=-100 if name == "labels" else 0
            )
            for name, some in found.items()
        }


@pytest.mark.parametrize("case", WRITERS, ids=str)
def test_a_language_model_learns_what_it_does_by_transformers_trainer(
    case: Case, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(workshop.base(case.family), local_files_only=True)
    options = list(OPTIONS)
    if case.method == "lora":
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
        grow(model)
        model.save_pretrained(tmp_path / "first")
        options.append(f"lora.init_from={tmp_path / 'first' / 'adapter_model.safetensors'}")
    taken = record_samples(monkeypatch)
    job = workshop.job(case, tmp_path / "ours", *options)
    job.train()
    assert len(taken) == STEPS and all(len(step) == ACCUMULATION for step in taken)

    optimizer = torch.optim.AdamW(
        [one for one in model.parameters() if one.requires_grad], lr=RATE, betas=BETAS, weight_decay=DECAY
    )
    trainer = Rows(
        model,
        TrainingArguments(
            output_dir=str(tmp_path / "theirs"),
            max_steps=STEPS,
            gradient_accumulation_steps=ACCUMULATION,
            max_grad_norm=MOST_NORM,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        optimizers=(optimizer, get_cosine_schedule_with_warmup(optimizer, 0, STEPS)),
    )
    trainer.batches = list(conversations_of(job, taken))
    trainer.train()
    for ours, theirs in zip(numbers(job.folder), logged(trainer), strict=True):
        assert ours == within(theirs)
        assert theirs["grad_norm"] > MOST_NORM
    require_near(saved(job, case), learned(model), rate=RATE)


def logged(trainer: Trainer) -> list[dict[str, float]]:
    """The figures of each step that both write."""
    names = ("step", "loss", "learning_rate", "grad_norm")
    return [{name: row[name] for name in names} for row in trainer.state.log_history if "loss" in row]


def saved(job: Job, case: Case) -> dict[str, torch.Tensor]:
    """Trained weights that a run saved, as peft or transformers loads them."""
    base = (
        job.folder / "model"
        if case.method == "full"
        else Path(str(job.context.config.model.pretrained_model_name_or_path))
    )
    model: Any = AutoModelForCausalLM.from_pretrained(base, local_files_only=True, dtype=torch.float32)
    if case.method == "lora":
        model = PeftModel.from_pretrained(model, job.folder / "lora", is_trainable=True)
    return learned(model)


def learned(model: Any) -> dict[str, torch.Tensor]:
    """The trained weights of a model."""
    return {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}


# pictures


def record_fed(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[Batch, Draw]]]:
    """Batches, and what was drawn for them, of every step that runs take from now on."""
    taken: list[list[tuple[Batch, Draw]]] = []

    def recorded(*arguments: Any) -> Iterator[Any]:
        for step in feed.feed(*arguments):
            kept = [(fed.batch, fed.draw) for fed in step if fed.batch is not None and fed.draw is not None]
            taken.append(kept)
            yield step

    monkeypatch.setattr(loop, "feed", recorded)
    return taken


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A pipeline's own model with peft's adapter, and the options of a run that begins with the same one."""

    model: Any
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of adapter: in peft's words, and in ours."""

    name: str
    config: Mapping[str, Any]
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


LORA = Kind(name="lora", config={})
OTHERS = (
    Kind(name="dora", config={"use_dora": True}, options=("lora.type=dora",)),
    Kind(
        name="patterns",
        config={"rank_pattern": {"to_q": 8}, "alpha_pattern": {"to_k": 3}},
        options=("lora.rank_pattern={to_q: 8}", "lora.alpha_pattern={to_k: 3}"),
    ),
)


def with_adapter(case: Case, base: Path, folder: Path, kind: Kind) -> Plain:
    """The adapter is not zero at the start, and its file is written by the pipeline."""
    pipeline: Any = DiffusionPipeline.from_pretrained(base)
    family = families.get(case.family)
    model = pipeline.components[family.trained_component].requires_grad_(case.method == "full").train()
    if case.method == "full":
        return Plain(model=model)
    targets = family.lora_targets["attention"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, **kind.config)
    model.add_adapter(config)
    grow(model)
    layers = {f"{family.trained_component}_lora_layers": get_peft_model_state_dict(model)}
    metadata = {f"{family.trained_component}_lora_adapter_metadata": config.to_dict()}
    pipeline.save_lora_weights(folder, **layers, **metadata)
    (first,) = folder.iterdir()
    first_of_both = ("lora.target_modules=attention", f"lora.init_from={first}")
    return Plain(model=model, options=(*kind.options, *first_of_both))


def steps_of_the_examples(job: Job, model: Any, taken: Sequence[Sequence[tuple[Batch, Draw]]]) -> list[Any]:
    """Train `model` as the examples do; the figures of each step."""
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=BETAS, weight_decay=DECAY)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    settings = job.context.family.settings(job.context.source, job.context.config)
    found = []
    for number, step in enumerate(taken, 1):
        mean = torch.cat([job.context.family.loss(model, *one, settings) for one in step]).mean()
        mean.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, MOST_NORM)
        rate = schedule.get_last_lr()[0]
        found.append({"step": number, "loss": mean.item(), "learning_rate": rate, "grad_norm": norm.item()})
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found


def within(figures: Mapping[str, float]) -> dict[str, object]:
    """Bounds of 1e-5 of each figure, and 2e-5 of a norm: how sums are rounded goes by the processor, and
    Kandinsky 5's full fine-tune was 1.2e-5 off on one of two kinds.
    """
    return {
        name: pytest.approx(value, rel=2e-5 if name == "grad_norm" else 1e-5)
        for name, value in figures.items()
    }


@pytest.mark.parametrize(
    ("case", "batch", "kind"),
    [
        (DRAWERS[0], 1, LORA),
        *(
            pytest.param(case, 1 if case.method == "full" else 2, LORA, marks=pytest.mark.slow)
            for case in DRAWERS
        ),
        *(pytest.param(DRAWERS[0], 2, kind, marks=pytest.mark.slow) for kind in OTHERS),
    ],
    ids=str,
)
def test_a_model_learns_what_it_does_in_the_loop_of_the_diffusers_examples(
    case: Case, batch: int, kind: Kind, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of a batch is that which tests/numerics compares with the examples'."""
    taken = record_fed(monkeypatch)
    plain = with_adapter(case, workshop.base(case.family), tmp_path / "first", kind)
    own = (f"train.train_batch_size={batch}", "data.caption_dropout_rate=0", *plain.options)
    job = workshop.job(case, tmp_path / "ours", *OPTIONS, *own)
    job.train()
    assert [sum(one.size for one, _ in step) for step in taken] == STEPS * [batch * ACCUMULATION]
    theirs = steps_of_the_examples(job, plain.model, taken)
    for ours, wanted in zip(numbers(job.folder), theirs, strict=True):
        assert ours == within(wanted)
        assert wanted["grad_norm"] > MOST_NORM
    component = job.context.family.trained_component
    if case.method == "lora":
        state = get_peft_model_state_dict(plain.model)
        require_near(
            load_file(lora_file(job)), {f"{component}.{name}": one for name, one in state.items()}, rate=RATE
        )
    else:
        again: Any = type(plain.model).from_pretrained(
            job.folder / "model" / component, torch_dtype=torch.float32
        )
        require_near(learned(again), learned(plain.model), rate=RATE)
