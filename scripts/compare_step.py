"""Time a LoRA step written the way diffusers' and peft's own examples are: what ours is compared with.

    python scripts/compare_step.py flux1_dev --base FOLDER --steps 20

Eager, activation checkpointing, flash attention, bf16 autocast over an fp32 adapter, AdamW, random weights.
Prints one line of JSON: milliseconds a step (median, fastest, slowest) and peak device memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when it is run as a file

from trainer import families
from trainer.config.schema import DataSet, RunConfig
from trainer.engine.proof import to_device
from trainer.families.protocol import Batch, Draw, Family, Shape
from trainer.modeling.lora import linear_names
from trainer.modeling.source import resolve_source

WARMUP_STEPS = 3


def main() -> None:
    """Parse arguments, train, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=families.names())
    parser.add_argument("--base", required=True, help="folder with the full-size configs")
    parser.add_argument("--resolution", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512, help="text tokens")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    family = families.get(arguments.family)
    config = RunConfig.model_validate(
        {
            "family": family.name,
            "model": {"pretrained_model_name_or_path": arguments.base, "weights": "random"},
            "data": {"sets": [DataSet(img_dir=Path()).model_dump()]},
            "output_dir": ".",
        }
    )
    source = resolve_source(config, families.components(family), trained=family.trained_component)
    model = base_model(family, source)
    add_adapter(model, family, arguments.rank)
    shape = Shape(
        batch_size=1,
        width=arguments.resolution,
        height=arguments.resolution,
        text_tokens=arguments.tokens,
        bytes_per_value=2,
    )
    batch = family.synthetic_batch(source.component_config(family.trained_component), shape, 0)
    header = {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}
    settings = family.settings(source, config)
    seconds = train(
        model,
        family,
        settings,
        batch,
        [family.draw(settings, [n], header) for n in range(4)],
        arguments.steps,
    )
    row = {
        "family": family.name,
        "milliseconds": round(1000 * statistics.median(seconds), 1),
        "fastest": round(1000 * min(seconds), 1),
        "slowest": round(1000 * max(seconds), 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 1024**3, 1),
    }
    print(json.dumps(row))


def base_model(family: Family, source: Any) -> Any:
    """The trained component with random bf16 weights on the GPU, frozen, checkpointed, by flash attention."""
    from transformers import PreTrainedModel

    model_class, folder = family.model_class(source), source.component(family.trained_component)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        if issubclass(model_class, PreTrainedModel):
            config = model_class.config_class.from_pretrained(folder)
            model = model_class._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
        else:
            model = model_class.from_config(model_class.load_config(folder))
    torch.set_default_dtype(torch.float32)
    model.requires_grad_(False)
    if isinstance(model, PreTrainedModel):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.to("cuda")
        model.enable_gradient_checkpointing()
        model.set_attention_backend("_native_flash")
    return model.train()


def add_adapter(model: Any, family: Family, rank: int) -> None:
    """peft's LoRA on the family's attention layers, in fp32 as the examples keep it."""
    import re

    from peft import LoraConfig

    pattern = re.compile(family.lora_targets["attention"])
    targets = [name for name in linear_names(model) if pattern.fullmatch(name)]
    model.add_adapter(
        LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, init_lora_weights="gaussian")
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def train(
    model: Any, family: Family, settings: Any, batch: Batch, draws: list[Draw | None], steps: int
) -> list[float]:
    """Seconds of each step."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4)
    seconds = []
    for step in range(WARMUP_STEPS + steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        moved, draw = to_device(batch, draws[step % len(draws)], "cuda", torch.bfloat16)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(model, family, settings, moved, draw)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # as the examples do for their progress bar
        if step >= WARMUP_STEPS:
            seconds.append(time.perf_counter() - started)
    return seconds


def loss_of(model: Any, family: Family, settings: Any, batch: Batch, draw: Draw | None) -> torch.Tensor:
    """The family's loss; of a language model transformers' own, over one row."""
    if family.sample_kind == "image":
        return family.loss(model, batch, draw, settings).mean()
    ids = batch.text["input_ids"]
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


if __name__ == "__main__":
    main()
