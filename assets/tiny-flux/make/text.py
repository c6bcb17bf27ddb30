"""The tiny base's tokenizers and text encoders, learned by matching captions with pictures."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tqdm import tqdm

from tests.random_bases.common import make_clip_tokenizer, make_t5_tokenizer, tiny_clip, tiny_t5

WIDTH = 96
TOKENS = 16
"""Length that the second encoder's captions are padded to: `data.max_sequence_length`."""
STEPS, BATCH, LEARNING_RATE = 4000, 512, 1e-3
_TEMPERATURE = 0.07
Log = Callable[[dict[str, float]], None]


def tokenizers(captions: Sequence[str]) -> dict[str, Any]:
    """CLIP's by byte pairs, T5's by words; every word of the captions is one token of the latter."""
    words = Counter(word for caption in captions for word in re.findall(r"[a-z0-9]+", caption.lower()))
    return {"tokenizer": make_clip_tokenizer(words, merges=1200), "tokenizer_2": make_t5_tokenizer(words)}


def encoder_configs(made: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Configs of two text encoders with two layers of WIDTH each."""
    heads = 4
    clip = {"intermediate_size": 4 * WIDTH, "num_attention_heads": heads}
    t5 = {"d_kv": WIDTH // heads, "num_heads": heads, "dropout_rate": 0.0}
    return {
        "text_encoder": tiny_clip(made["tokenizer"], WIDTH) | clip,
        "text_encoder_2": tiny_t5(made["tokenizer_2"], WIDTH) | t5,
    }


class Pictures(torch.nn.Module):
    """Latents (B, 16, 16, 16) to one vector a picture; thrown away after training."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        sizes = (channels, 64, 128, 192)
        layers: list[torch.nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [torch.nn.Conv2d(before, after, 3, 2, 1), torch.nn.GroupNorm(8, after), torch.nn.GELU()]
        self.layers = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(192 * 4, WIDTH))

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """(B, WIDTH)."""
        result: torch.Tensor = self.layers(latents)
        return result


def train(
    captions: Sequence[str],
    picture_of: Sequence[int],
    latents: torch.Tensor,
    *,
    device: str,
    seed: int,
    log: Log,
    steps: int = STEPS,
    batch: int = BATCH,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tokenizers, encoders): both encoders learn which picture a caption belongs to (InfoNCE both ways).

    Caption i is of picture `picture_of[i]`, whose latents are `latents[picture_of[i]]`. The encoders are used
    as FluxPipeline does: CLIP's state at the end token, T5's states at all positions, without a mask.
    """
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(seed)
    made = tokenizers(captions)
    configs = encoder_configs(made)
    clip: Any = CLIPTextModel(CLIPTextConfig(**configs["text_encoder"]))
    t5: Any = T5EncoderModel(T5Config(**configs["text_encoder_2"]))
    clip.to(device)
    t5.to(device)
    towers = torch.nn.ModuleList([Pictures(latents.shape[1]), Pictures(latents.shape[1])]).to(device)
    mean_to_vector = torch.nn.Linear(WIDTH, WIDTH).to(device)
    clip_tokens = token_ids(made["tokenizer"], captions, 77).to(device)
    t5_tokens = token_ids(made["tokenizer_2"], captions, TOKENS).to(device)
    parameters = [p for part in (clip, t5, towers, mean_to_vector) for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / 200, 0.5 + 0.5 * math.cos(math.pi * min(1.0, i / steps)))
    )
    owners = torch.tensor(picture_of, device=device)
    pictures = latents.to(device)
    for step in tqdm(range(1, steps + 1), desc="text encoders"):
        chosen = torch.randperm(len(owners), device=device)[:batch]
        own = owners[chosen]
        noised = pictures[own] + 0.2 * torch.randn_like(pictures[own])
        vectors = (
            clip(clip_tokens[chosen]).pooler_output,
            mean_to_vector(t5(t5_tokens[chosen]).last_hidden_state.mean(1)),
        )
        losses = [match_loss(text, tower(noised), own) for text, tower in zip(vectors, towers, strict=True)]
        optimizer.zero_grad(set_to_none=True)
        torch.stack(losses).sum().backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            log({"step": step, "clip": losses[0].item(), "t5": losses[1].item()})
    return made, {"text_encoder": clip.eval(), "text_encoder_2": t5.eval()}


def match_loss(text: torch.Tensor, picture: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """Cross entropy of matching (B, D) with (B, D); captions of one picture are all right answers."""
    logits = F.normalize(text, dim=1) @ F.normalize(picture, dim=1).T / _TEMPERATURE
    same = (owners[:, None] == owners[None]).float()
    targets = same / same.sum(1, keepdim=True)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def token_ids(tokenizer: Any, captions: Sequence[str], length: int) -> torch.Tensor:
    """Ids (N, length); raises ValueError where a caption is longer."""
    longest = max(len(ids) for ids in tokenizer(list(captions)).input_ids)
    if longest > length:
        raise ValueError(f"a caption has {longest} tokens, more than {length}")
    padded = tokenizer(list(captions), padding="max_length", max_length=length, return_tensors="pt")
    ids: torch.Tensor = padded.input_ids
    return ids
