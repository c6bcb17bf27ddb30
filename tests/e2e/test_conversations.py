"""A base without a chat template, trained by the command line for some epochs on conversations whose columns
have names of their own, on one process and on several; its result is read by transformers and PEFT alone.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import random_bases
from tests.e2e.nursery import ALL_RANKS, Nursery

QUESTIONS = [(f"How many are {n} and {n}?", " and ".join(["one"] * (n + 1))) for n in range(9)]
HELD_OUT = [
    ("How many are ten and one?", "one and one and two"),
    ("Why?", "Because."),
    ("Who?", "You and one."),
]


def write(path: Path, rows: list[tuple[str, str]]) -> None:
    path.write_text(
        "".join(json.dumps({"q": asked, "a": answer, "by": "Be kind."}) + "\n" for asked, answer in rows)
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversations")
    random_bases.build("llama", "tiny", folder / "base")
    (folder / "base" / "chat_template.jinja").unlink()
    write(folder / "chats.jsonl", QUESTIONS)
    write(folder / "held.jsonl", HELD_OUT)
    info = {"mine": {"file_name": "held.jsonl", "columns": {"prompt": "q", "response": "a", "system": "by"}}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


Trained = Callable[..., tuple[Path, str]]


@pytest.fixture(scope="module")
def trained(place: Path, nursery: Callable[..., Nursery]) -> Trained:
    """`trained(GPUS, OVERRIDE...)` gives a run's folder and what it printed; each is trained once."""
    return functools.cache(functools.partial(_train, place, nursery))


def _train(place: Path, nursery: Callable[..., Nursery], gpus: int, *overrides: str) -> tuple[Path, str]:
    name = f"run-{gpus}-{len(overrides)}"
    columns = {"prompt": "q", "response": "a", "system": "by"}
    content = {
        "family": "llama",
        "method": "lora",
        "output_dir": str(place / name),
        "model": {"pretrained_model_name_or_path": str(place / "base"), "download": "never"},
        "data": {
            "sets": [{"chat_file": str(place / "chats.jsonl"), "columns": columns}],
            "max_sequence_length": 112,
        },
        "lora": {"rank": 4, "alpha": 8},
        "train": {
            "num_train_epochs": 3, "gradient_accumulation_steps": 4, "learning_rate": 1e-2,
            "lr_warmup_steps": 0, "log_every_steps": 1,
        },
        "validation": {"chat_file": str(place / "held.jsonl"), "columns": columns, "every_steps": 2},
        "parallel": {"gpus": gpus},
    }  # fmt: skip
    file = place / f"{name}.yaml"
    file.write_text(json.dumps(content))
    environ = {**os.environ, "TRAINER_PROFILE": "cpu", "OMP_NUM_THREADS": "1"}
    environ |= {
        "TRAINER_RUNTIME_DIR": str(place / f"{name}-runtime"),
        "TRAINER_CACHE_DIR": str(place / "cache"),
    }
    environ["TRAINER_METRICS_PORT"] = "0"
    if gpus == 4:  # of two the second is a process of its own
        environ[ALL_RANKS] = "1"
    words = [one for override in overrides for one in ("--set", override)]
    done = nursery(alternate=True).run(["-m", "trainer", "train", str(file), *words], environ)
    assert done.returncode == (78 if "data.chat_template=auto" in overrides else 0), done.stderr
    return place / name, done.stderr


def measured(run: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "validation_loss", "validation_perplexity", "validation_token_accuracy")
    return [tuple(row[name] for name in names) for row in rows if "validation_loss" in row]


def brute_force(model: Any, tokenizer: Any) -> tuple[Any, ...]:
    """Loss, perplexity and token accuracy of the held-out answers, with what ends each, by transformers."""
    loss, learned, right = 0.0, 0, 0
    for asked, answer in HELD_OUT:
        question = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": asked}]
        answered = [*question, {"role": "assistant", "content": answer}]
        begin = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        ids = torch.tensor([tokenizer.apply_chat_template(answered, return_dict=False)])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(begin) - 1 : -1]
        wanted = ids[0, len(begin) :]
        loss += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
        right += int((logits.argmax(-1) == wanted).sum())
        learned += len(wanted)
    mean = loss / learned
    return pytest.approx(mean, rel=1e-4), pytest.approx(math.exp(mean), rel=1e-3), right / learned


@pytest.mark.slow
def test_a_base_without_a_template_is_trained_and_read_by_others(place: Path, trained: Trained) -> None:
    run, printed = trained(1, "data.chat_template=llama3")
    tokenizer = AutoTokenizer.from_pretrained(run / "lora")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Hello! "}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
    )
    last = measured(run)[-1]
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    assert measured(run)[0][1:] == brute_force(base, tokenizer)
    assert last[1:] == brute_force(PeftModel.from_pretrained(base, run / "lora"), tokenizer)
    assert 0 < last[3] < 1 and last[2] < measured(run)[0][2]
    assert f"3 epochs of 9 conversations are {last[0]} steps" in printed
    assert f"perplexity {measured(run)[0][2]:.3g} -> {last[2]:.3g}, token accuracy" in printed
    _published(place / "run-1-1-runtime" / "metrics.prom", run, last)


def _published(file: Path, run: Path, last: tuple[Any, ...]) -> None:
    """Prometheus' values are those of metrics.jsonl, and counters the sums of its steps."""
    families = text_string_to_metric_families(file.read_text())
    found = {
        sample.name: sample.value for family in families for sample in family.samples if not sample.labels
    }
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    assert (found["trainer_validation_perplexity"], found["trainer_validation_token_accuracy"]) == last[2:]
    for name in ("tokens_per_second", "learned_tokens_per_second"):
        assert found[f"trainer_{name}"] == rows[-1][name] > 0
    for name in ("tokens", "learned_tokens"):
        seconds = [row["seconds_per_step"] * row[f"{name}_per_second"] for row in rows]
        assert found[f"trainer_{name}_total"] == pytest.approx(sum(seconds), rel=1e-6)
    assert found["trainer_learned_tokens_total"] < found["trainer_tokens_total"]


@pytest.mark.slow
def test_without_a_template_the_setting_is_named(trained: Trained) -> None:
    _, printed = trained(1, "data.chat_template=auto", "train.seed=1")
    assert "has no chat template" in printed and "write data.chat_template: alpaca, " in printed


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [2, 4])
def test_epochs_and_held_out_values_are_the_runs_and_not_of_its_processes(
    gpus: int, place: Path, trained: Trained
) -> None:
    alone, _ = trained(1, "data.chat_template=llama3")
    info = ("validation.chat_file=null", "validation.columns=null", "validation.name=mine")
    info += (f"validation.dataset_info={place / 'dataset_info.json'}", "data.chat_template=llama3")
    several, _ = trained(gpus, *info)
    assert measured(several) == measured(alone)
    file = "lora/adapter_model.safetensors"
    assert (several / file).read_bytes() == (alone / file).read_bytes()
