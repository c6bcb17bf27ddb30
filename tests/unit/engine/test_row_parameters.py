"""Parameters in rows: gathered for the model, updated by the rank that has them, whole in files."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from tests.ranks import Workers
from trainer.config.schema import TrainSection
from trainer.engine.optimizing.updater import Updater
from trainer.engine.ranks import ALONE, Ranks
from trainer.modeling.blocks.recompute import recompute_blocks
from trainer.modeling.rows import Rows
from trainer.modeling.tensor_file import Later, Writable

STEPS, MICRO_BATCHES, CLIP = 3, 12, 0.3


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 12])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_are_parted_as_torch_parts_them(count: int, size: int) -> None:
    whole = torch.arange(count * 3).view(count, 3)
    parts = [Rows(shape=(count, 3), rank=rank, size=size) for rank in range(size)]
    wanted = list(whole.chunk(size))
    for number, rows in enumerate(parts):
        own = whole[rows.start : rows.stop]
        assert torch.equal(own, wanted[number] if number < len(wanted) else whole[:0])
        assert len(own) <= rows.each
        if len(own):
            assert rows.first_value == own[0, 0]


class Block(torch.nn.Module):
    """Odd widths, a vector, and one row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 7), torch.nn.Linear(7, 6)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(torch.relu(self.up(values))) * self.scale


class Small(torch.nn.Module):
    """Three blocks between layers of their own, a buffer, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(5, 6), torch.nn.Linear(6, 3)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.unused = torch.nn.Parameter(torch.ones(3, 2))
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        for block in self.blocks:
            values = block(values)
        return self.last(values) + self.shift


def inputs(number: int) -> torch.Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(number))


def whole(tensors: Mapping[str, Writable]) -> dict[str, torch.Tensor]:
    made = {name: tensors[name] for name in sorted(tensors)}
    return {name: one.make() if isinstance(one, Later) else one.clone() for name, one in made.items()}


Ended = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""Gradient norms, weights and optimizer state."""


def trained(ranks: Ranks, kind: str, dtype: torch.dtype, recomputed: int) -> Ended:
    """Three steps of twelve micro-batches, which ranks have in turn."""
    model = Small().to(dtype)
    blocks = {f"blocks.{number}": block for number, block in enumerate(model.blocks)}
    if recomputed:
        recompute_blocks(blocks, recomputed)
    train, rows, run = TrainSection(max_grad_norm=CLIP, adam_epsilon=1e-5, ema_decay=0.5), None, None
    if ranks.size > 1:
        from trainer.engine.optimizing.row_parameters import RowParameters
        from trainer.modeling.storage.trained_rows import in_rows

        root = in_rows(model, blocks, device="cpu", size=ranks.size)
        rows, run = RowParameters(root, ranks), root.run
    updater = Updater(dict(model.named_parameters()), train, kind, ranks, rows)
    norms = []
    for step in range(STEPS):
        for number in range(ranks.rank, MICRO_BATCHES, ranks.size):
            given = inputs(10 * step + number).to(dtype)

            def call(given: torch.Tensor = given) -> torch.Tensor:
                return model(given)

            loss = (call() if run is None else run(call)).float().square().mean()
            (loss / MICRO_BATCHES).backward()
            updater.accumulate()
        norm, bad = updater.step(1e-2, torch.tensor(1.0))
        assert bad == 0.0
        norms.append(float(norm))
        with torch.no_grad(), updater.averaged():  # the rows are the means meanwhile, and not afterwards
            if run is not None:
                run(call)
    weights, state = updater.saved()
    assert updater.saved_bytes == sum(one.nbytes for one in weights.values())
    return norms, whole(weights), whole(state)


PAIRS = [
    ("adamw_fused_fp32", 2, 0), ("adamw_fused_fp32", 3, 2), ("adamw_fused_fp32", 4, 0),
    ("adamw_split_bf16", 2, 2), ("adamw_split_bf16", 3, 0), ("adamw_split_bf16", 4, 2),
    ("adamw_stochastic_bf16", 3, 2), ("adamw_stochastic_bf16", 4, 0),
]  # fmt: skip
"""Each kind of optimizer and each number of ranks, both with and without recomputed blocks."""


@pytest.mark.parametrize(("kind", "size", "recomputed"), PAIRS)
def test_rows_learn_what_whole_weights_learn(pool: Workers, kind: str, size: int, recomputed: int) -> None:
    """Also those of which a rank has nothing; in fp32, whose sums differ by their order alone."""
    norms, weights, state = trained(ALONE, kind, torch.float32, recomputed)
    for found in pool.call(trained, size, kind, torch.float32, recomputed):
        assert found[0] == pytest.approx(norms, rel=1e-5)
        for ours, theirs in zip(found[1:], (weights, state), strict=True):
            assert ours.keys() == theirs.keys()
            for name in theirs:
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6, msg=name)


def test_rows_in_bf16_have_all_their_state(pool: Workers) -> None:
    kind = "adamw_split_bf16"
    norms, weights, state = trained(ALONE, kind, torch.bfloat16, 0)
    for found in pool.call(trained, 4, kind, torch.bfloat16, 0):
        assert found[0] == pytest.approx(norms, rel=0.03)
        for ours, theirs in zip(found[1:], (weights, state), strict=True):
            assert ours.keys() == theirs.keys()
            assert all(ours[name].shape == theirs[name].shape for name in theirs)
            assert all(ours[name].dtype == theirs[name].dtype for name in theirs)
        for name, theirs in weights.items():
            torch.testing.assert_close(found[1][name], theirs, rtol=0.03, atol=0.01, msg=name)


def of_two_types(ranks: Ranks) -> tuple[list[torch.dtype], float]:
    """A block with a layer that its class keeps in fp32, as Kandinsky's modulation."""
    from trainer.engine.optimizing.row_parameters import RowParameters
    from trainer.modeling.storage.trained_rows import in_rows

    model = Small().bfloat16()
    model.blocks[1].up.float()
    model.blocks[1].up.register_forward_pre_hook(lambda module, given: (given[0].float(),))
    model.blocks[1].up.register_forward_hook(lambda module, given, found: found.bfloat16())
    blocks = {f"blocks.{number}": block for number, block in enumerate(model.blocks)}
    root = in_rows(model, blocks, device="cpu", size=ranks.size)
    rows = RowParameters(root, ranks)
    root.run(lambda: model(inputs(0).bfloat16())).float().square().mean().backward()
    rows.take_gradients()
    gradients = {name: one.grad for name, one in rows.own.items() if one.grad is not None}
    norm = rows.norm(torch.stack([one.float().norm() for one in gradients.values()]).norm())
    return [gradients[f"blocks.1.{name}.weight"].dtype for name in ("up", "down")], float(norm)


def test_a_layer_of_another_type_is_gathered_for_itself(pool: Workers) -> None:
    (types, norm), *others = pool.call(of_two_types, 3)
    assert types == [torch.float32, torch.bfloat16]
    assert norm > 0 and others == [(types, norm)] * 2


@pytest.mark.parametrize("count", range(7))
def test_ranks_in_lockstep_have_as_many_items_and_take_each(count: int) -> None:
    for size in (1, 2, 3, 4):
        shares = [Ranks(rank=rank, size=size).in_lockstep(count) for rank in range(size)]
        assert len({len(share) for share in shares}) == 1
        taken = [shares[number % size][number // size] for number in range(count)]
        assert taken == list(range(count))
        assert all(0 <= item < count for share in shares for item in share)
