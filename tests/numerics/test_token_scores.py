"""Losses and correct tokens of conversations against whole logits of transformers, one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.numerics.test_conversations import LONG
from tests.numerics.test_llama import CHATS, encode
from tests.random_bases.llama import tokenizer as make_tokenizer
from trainer.families import language
from trainer.families.llama import LLAMA
from trainer.modeling.attention.packed_rows import set_packed_attention
from trainer.modeling.fused import head_loss


def fitted(base: Path, ids: torch.Tensor) -> Any:
    """A model that has learned a part of one conversation: some of its tokens are right, and some wrong."""
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(base, local_files_only=True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(12):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_scores_are_those_of_whole_logits(
    tiny_base: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer()
    rows = [encode(tokenizer, chat, limit=2048) for chat in (*CHATS, LONG)]
    model = fitted(tiny_base("llama"), rows[-1]["input_ids"][None, :200])
    losses, correct = [], []
    for row in rows:
        learned = row["loss_weight"][1:] == 1
        with torch.no_grad():
            logits = model(input_ids=row["input_ids"][None]).logits[0, :-1][learned]
        answers = row["input_ids"][1:][learned]
        losses.append(torch.nn.functional.cross_entropy(logits, answers, reduction="sum"))
        correct.append(int((logits.argmax(-1) == answers).sum()))
    assert 0 < sum(correct) < sum(int(row["loss_weight"].sum()) for row in rows)

    widths = list[int]()
    real = head_loss._loss_and_gradient
    monkeypatch.setattr(language, "LOGITS_TOKENS", 7)
    monkeypatch.setattr(
        head_loss,
        "_loss_and_gradient",
        lambda logits, *rest: widths.append(len(logits)) or real(logits, *rest),
    )
    model.lm_head.register_forward_hook(lambda head, given, logits: widths.append(len(logits)))
    set_packed_attention(model, "native")
    ours, hits = language.scores(model, LLAMA.collate(rows, [{}] * len(rows)))
    assert ours.tolist() == pytest.approx([one.item() for one in losses], rel=1e-5)
    assert hits.tolist() == correct
    assert max(widths) <= 7 and sum(widths) == 2 * sum(int(row["loss_weight"].sum()) for row in rows)


def test_losses_beside_correct_tokens_have_the_bits_of_losses_alone(tiny_base: Callable[[str], Path]) -> None:
    rows = [encode(make_tokenizer(), chat) for chat in CHATS]
    model = LlamaForCausalLM.from_pretrained(tiny_base("llama"), local_files_only=True).eval()
    set_packed_attention(model, "native")
    batch = LLAMA.collate(rows, [{}] * len(rows))
    with torch.no_grad():
        alone = language.losses(model, batch)
    assert torch.equal(alone, language.scores(model, batch)[0])
