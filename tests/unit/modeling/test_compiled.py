"""Compiled blocks against eager ones, and how many graphs they need. No C++ compiler: graphs run in eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._functorch import partitioners

from tests.numerics.saved import kept_bytes
from tests.unit.modeling.small_models import FAMILIES, Case, Storage, case, difference, relative, with_inputs
from trainer.modeling.adapter.joined_lora import join_siblings
from trainer.modeling.blocks import compiled
from trainer.modeling.blocks.compiled import compile_blocks, eager, graphs_compiled
from trainer.modeling.blocks.recompute import recompute_blocks, repeated_blocks
from trainer.modeling.fused.norms import fuse_head_norms
from trainer.modeling.storage import fp8_product

# two blocks of one kind and three of the other
DEPTH = {"num_layers": 2, "num_single_layers": 3}
# one kind, which is quick to trace
SHORT = {"num_layers": 0, "num_single_layers": 2}
SINGLE = {"num_layers": 0, "num_single_layers": 1}
KINDS = FAMILIES["flux1_dev"].blocks
STREAMS = ("hidden_states", "encoder_hidden_states")


@pytest.fixture(autouse=True)
def plain_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is compiled is traced, split in forward and backward, and not turned into C++."""
    compile_module: Any = torch.nn.Module.compile

    def compile_eager(module: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        compile_module(module, *arguments, **{**options, "backend": "aot_eager"})

    monkeypatch.setattr(torch.nn.Module, "compile", compile_eager)
    monkeypatch.setattr(compiled, "MOST_COMPILED", 6)
    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit),
        torch._functorch.config.patch(activation_memory_budget=1.0),
        torch._inductor.config.patch({"triton.coalesce_tiling_analysis": True, "shape_padding": True}),
    ):
        yield
    torch._dynamo.reset()


def reached(depth: dict[str, int] = SINGLE, storage: Storage = "plain") -> Case:
    """A model whose first block's inputs have gradients like those of blocks behind it: one graph for all."""
    made = case("flux1_dev", storage=storage, changes=depth)
    for embedder in (made.model.x_embedder, made.model.context_embedder):
        embedder.requires_grad_(True)
    return made


def fast(
    storage: Storage = "plain", *, budget: float = 1.0, depth: dict[str, int] = SHORT, reach: bool = False
) -> Case:
    """The model that a run builds: layers joined, norms fused, blocks compiled."""
    doubles, singles = depth["num_layers"], depth["num_single_layers"]
    made = reached(depth, storage) if reach else case("flux1_dev", storage=storage, changes=depth)
    assert join_siblings(made.model, made.predict) == 3 * (2 * doubles + singles)
    assert fuse_head_norms(made.model) == 4 * doubles + 2 * singles
    assert compile_blocks(repeated_blocks(made.model, KINDS), activation_budget=budget) == doubles + singles
    return made


def resized(made: Case, size: int) -> Case:
    return with_inputs("flux1_dev", made.model, size)


@pytest.mark.parametrize("storage", ["plain", pytest.param("fp8_two_copies", marks=pytest.mark.slow)])
def test_compiled_blocks_compute_what_eager_ones_do(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling makes one graph per kind and direction, not one per block; a later step compiles nothing."""
    monkeypatch.setattr(fp8_product, "_kept_ones", {})
    depth = {"num_layers": 2, "num_single_layers": 1}
    plain = reached(depth, storage)
    join_siblings(plain.model, plain.predict)
    wanted_output, wanted = plain.gradients()
    fp8_product.keep_ones("cpu")  # what eager blocks make anew
    before = graphs_compiled()
    made = fast(storage, depth=depth, reach=True)
    for _ in range(2):
        output, found = made.gradients()
        assert relative(output, wanted_output) < 1e-6
        assert difference(found, wanted) < 1e-5
    assert graphs_compiled() - before == 2


@pytest.mark.slow
def test_another_size_costs_a_few_graphs_once() -> None:
    """The second size makes lengths symbols; a third one finds them."""
    made = fast()
    counts = []
    before = graphs_compiled()
    for size in (64, 96, 128, 64):
        wanted_output, wanted = resized(case("flux1_dev", changes=SHORT), size).gradients()
        output, found = resized(made, size).gradients()
        assert relative(output, wanted_output) < 1e-5
        assert difference(found, wanted) < 1e-4
        counts.append(graphs_compiled() - before)
    assert counts[1] <= 2 * counts[0]
    assert counts[1:] == [counts[1]] * 3


@pytest.mark.parametrize(
    "varying", [{}, {KINDS[1]: [(), ()]}, {KINDS[1]: [(1,), (1,)]}, {KINDS[1]: [(1,), (0, 1)]}]
)
def test_settings_of_graphs_for_every_size(varying: dict[str, list[tuple[int, ...]]]) -> None:
    """Where a size varies nothing is padded, by which each batch had a graph of its own; where two do, no
    tiling is looked for, in which torch 2.11 fails (its issue 181563).
    """
    settings = torch._inductor.config
    assert settings.triton.coalesce_tiling_analysis and settings.shape_padding
    assert compile_blocks(
        repeated_blocks(case("flux1_dev", changes=SHORT).model, KINDS),
        activation_budget=1.0,
        varying=varying,
    )
    most = max((len(dimensions) for dimensions in varying.get(KINDS[1], [])), default=0)
    assert (settings.shape_padding, settings.triton.coalesce_tiling_analysis) == (most == 0, most < 2)


@pytest.mark.slow
def test_sizes_that_are_known_to_vary_cost_no_graph_more() -> None:
    made = reached()
    join_siblings(made.model, made.predict)
    shapes = [made, resized(made, 96)]
    varying = compiled.varying_sizes(repeated_blocks(made.model, KINDS), [one.predict for one in shapes])
    assert {name: found[0] for name, found in varying.items()} == {KINDS[1]: (1,)}
    compile_blocks(repeated_blocks(made.model, KINDS), activation_budget=1.0, varying=varying)
    before, counts = graphs_compiled(), []
    for size in (64, 96, 128):
        wanted_output, wanted = resized(reached(), size).gradients()
        output, found = resized(made, size).gradients()
        assert relative(output, wanted_output) < 1e-5
        assert difference(found, wanted) < 1e-4
        counts.append(graphs_compiled() - before)
    assert counts == [1, 1, 1]


def test_what_varies_is_found_in_tuples_and_mappings_and_before_blocks_are_compiled_alone() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor, more: Any, *, options: Any) -> torch.Tensor:
            return x

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, tokens: int, text: int) -> torch.Tensor:
            more = (torch.ones(3, 4), [torch.ones(text, 2)], "name", None)
            found: torch.Tensor = self.block(
                torch.ones(1, tokens, 8), more, options={"index": torch.ones(1, tokens)}
            )
            return found

    model = Model()
    runs = [lambda size=size: model(*size) for size in ((4, 2), (6, 2), (4, 5))]
    assert compiled.varying_sizes(repeated_blocks(model, ("Block",)), runs) == {
        "Block": [(1,), (), (0,), (1,)]
    }
    assert not model.block._forward_pre_hooks


def test_eager_blocks_compile_nothing_until_its_end_or_an_error() -> None:
    made = fast(depth=SINGLE, reach=True)
    before = graphs_compiled()
    with pytest.raises(ZeroDivisionError), eager():
        raise ZeroDivisionError
    made.gradients()
    assert graphs_compiled() > before
    before = graphs_compiled()
    other = resized(made, 96)
    plain = resized(reached(), 96)
    with torch.no_grad(), eager():
        found = other.predict()
    assert graphs_compiled() == before
    with torch.no_grad():
        assert relative(found, plain.predict()) < 1e-6
    # and training goes on with the graphs that there are
    made.gradients()
    assert graphs_compiled() == before


def test_only_blocks_of_the_kinds_are_compiled() -> None:
    made = case("flux1_dev", changes=DEPTH)
    assert compile_blocks(repeated_blocks(made.model, KINDS[:1]), activation_budget=1.0) == 2
    assert compile_blocks(repeated_blocks(made.model, ("NoSuchBlock",)), activation_budget=1.0) == 0


@pytest.mark.slow
def test_the_plan_s_budget_reaches_the_partitioner(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[float] = []
    choose = partitioners.choose_saved_values_set

    def recorded(*given: Any, memory_budget: float) -> Any:
        budgets.append(memory_budget)
        return choose(*given, memory_budget=memory_budget)

    monkeypatch.setattr(partitioners, "choose_saved_values_set", recorded)
    before = torch._functorch.config.activation_memory_budget
    fast(budget=0.25, depth=SINGLE).gradients()
    assert set(budgets) == {0.25}
    torch._dynamo.reset()
    budgets.clear()
    recomputing(1, inside=True, depth=SHORT).gradients()
    assert set(budgets) == {0.0, 1.0}
    assert torch._functorch.config.activation_memory_budget == before


def recomputing(count: int, *, inside: bool, depth: dict[str, int] = DEPTH) -> Case:
    """A model whose first blocks are recomputed, all compiled."""
    made = case("flux1_dev", changes=depth)
    join_siblings(made.model, made.predict)
    for _ in range(1 + inside):  # said twice is said once
        number = recompute_blocks(repeated_blocks(made.model, KINDS), count, inside=inside)
    assert compile_blocks(repeated_blocks(made.model, KINDS), activation_budget=1.0) == sum(depth.values())
    assert number == (count or sum(depth.values()))
    return made


@pytest.mark.slow
def test_blocks_that_are_recomputed_in_their_graph_give_the_same_gradients() -> None:
    """Beside others that keep everything, with graphs of their own."""
    wanted_output, wanted = case("flux1_dev", changes=DEPTH).gradients()
    made, before = recomputing(3, inside=True), graphs_compiled()
    for _ in range(2):
        output, found = made.gradients()
        assert relative(output, wanted_output) < 1e-6
        assert difference(found, wanted) < 1e-5
    assert graphs_compiled() - before <= 4
    everything = fast(depth=DEPTH)
    kept = [kept_bytes(one.model, lambda one=one: one.predict().sum()) for one in (made, everything)]
    assert kept[0] < 0.6 * kept[1]


@pytest.mark.slow
def test_one_block_more_that_is_recomputed_keeps_its_input_alone() -> None:
    inputs: list[int] = []
    plain = case("flux1_dev", changes=SHORT)
    plain.model.single_transformer_blocks[0].register_forward_pre_hook(
        lambda _, __, named: inputs.extend(4 * named[name].numel() for name in STREAMS), with_kwargs=True
    )
    plain.predict()
    kept = []
    for number in (2, 3):
        torch._dynamo.reset()
        made = recomputing(0, inside=True, depth=SHORT | {"num_single_layers": number})
        kept.append(kept_bytes(made.model, lambda made=made: made.predict().sum()))
    assert kept[1] - kept[0] == sum(inputs) > 0


@pytest.mark.slow
def test_what_nothing_waits_for_is_not_computed_again() -> None:
    """A block's last product, which checkpointing from outside repeats: fewer products in all."""
    operations = []
    for inside in (False, True):
        torch._dynamo.reset()
        made = recomputing(0, inside=inside)
        made.gradients()
        with torch.profiler.profile(with_flops=True) as profiler:
            made.gradients()
        operations.append(sum(event.flops for event in profiler.key_averages()))
    assert 0 < operations[1] < 0.9 * operations[0]


def test_a_graph_break_is_an_error() -> None:
    """Half a block in Python would be slow and unseen."""

    class Breaking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return x + 1

    model = torch.nn.Sequential(Breaking())
    assert compile_blocks(repeated_blocks(model, ("Breaking",)), activation_budget=1.0) == 1
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(torch.ones(2))


def test_blocks_under_checkpointing_are_compiled_and_equal() -> None:
    wanted_output, wanted = reached().gradients()
    made = reached()
    join_siblings(made.model, made.predict)
    made.model.enable_gradient_checkpointing()
    compile_blocks(repeated_blocks(made.model, KINDS), activation_budget=1.0)
    before = graphs_compiled()
    output, found = made.gradients()
    assert graphs_compiled() > before
    assert relative(output, wanted_output) < 1e-5
    assert difference(found, wanted) < 1e-5


def few(budget: float = 1.0, recomputed: int = 0) -> tuple[Case, list[str]]:
    """A model of two blocks, the first few recomputed in their graph, and what is said of the limit."""
    said: list[str] = []
    made = case("flux1_dev", changes=SHORT)
    join_siblings(made.model, made.predict)
    if recomputed:
        recompute_blocks(repeated_blocks(made.model, KINDS), recomputed, inside=True)
    compile_blocks(repeated_blocks(made.model, KINDS), activation_budget=budget, say=said.append)
    return made, said


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1.0, 0.4])
def test_shapes_beyond_the_limit_run_as_they_are_written(
    budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "MOST_COMPILED", 4)
    made, said = few(budget)
    before = graphs_compiled()
    counts = []
    with torch._dynamo.config.patch(assume_static_by_default=True, automatic_dynamic_shapes=False):
        for size in (64, 96, 128, 160, 64):  # two graphs each: the first block's input has no gradient
            wanted_output, wanted = resized(case("flux1_dev", changes=SHORT), size).gradients()
            output, found = resized(made, size).gradients()
            assert relative(output, wanted_output) < 1e-5
            assert difference(found, wanted) < 1e-4
            counts.append(graphs_compiled() - before)
    assert counts == [2, 4, 4, 4, 4]
    assert len(said) == 1 and "compiled 4 times" in said[0]


@pytest.mark.slow
def test_beyond_the_limit_blocks_that_kept_a_part_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_COMPILED", 2)
    kept = []
    for budget in (1.0, 0.4):
        torch._dynamo.reset()
        made, said = few(budget)
        with torch._dynamo.config.patch(assume_static_by_default=True, automatic_dynamic_shapes=False):
            made.gradients()
            other = resized(made, 96)
            other.gradients()
            assert len(said) == 1
            kept.append(kept_bytes(made.model, lambda other=other: other.predict().sum()))
    assert kept[1] < 0.5 * kept[0]


@pytest.mark.slow
def test_both_classes_of_a_kind_have_room_below_the_limit_and_keep_little_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan that has some blocks recomputed has no room for others that run as they are written."""
    monkeypatch.setattr(compiled, "MOST_COMPILED", 2)
    made, said = few(recomputed=1)
    before = graphs_compiled()
    with torch._dynamo.config.patch(assume_static_by_default=True, automatic_dynamic_shapes=False):
        for size in (64, 96, 128):
            wanted_output, wanted = resized(case("flux1_dev", changes=SHORT), size).gradients()
            other = resized(made, size)
            output, found = other.gradients()
            assert relative(output, wanted_output) < 1e-5
            assert difference(found, wanted) < 1e-4
        assert graphs_compiled() - before == 4
        assert len(said) == 1 and "compiled 4 times" in said[0]
        plain = resized(case("flux1_dev", changes=SHORT), 128)
        kept = [kept_bytes(one.model, lambda one=one: one.predict().sum()) for one in (other, plain)]
    assert kept[0] < 0.5 * kept[1]
