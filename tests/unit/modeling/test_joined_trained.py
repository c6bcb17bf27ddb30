"""Trained linears of one input computed as one, beside torch's own layers, each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.modeling.small_models import difference, relative
from trainer.modeling.blocks.recompute import recompute_blocks, repeated_blocks
from trainer.modeling.blocks.same_input import same_inputs
from trainer.modeling.storage.fp8_trained import Fp8TrainedLinear, WeightGradient, refresh_weights
from trainer.modeling.storage.joined_trained import Joined, follow_weights, join_trained

ROUNDING = 1e-6
KINDS = ("plain", "fp8", "bf16")


class Block(torch.nn.Module):
    """Three layers of one input, of other sizes, and one of another input."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.one, self.two, self.three = (torch.nn.Linear(64, out, bias) for out in (64, 32, 96))
        self.other = torch.nn.Linear(64, 64, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = self.one(x), self.two(x), self.three(x)
        return self.other(one.sin()) + torch.cat([two, three[..., :32]], -1) * three[..., 32:]


def block(
    kind: str = "plain", *, bias: bool = True, dtype: torch.dtype = torch.float32, joins: bool = True
) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(bias)).to(dtype)
    names = same_inputs(model, lambda: model(rows(dtype)), (torch.nn.Linear,))
    if kind != "plain":
        gradient: WeightGradient = "fp8" if kind == "fp8" else "bf16"
        for name in ("one", "two", "three", "other"):
            layer = Fp8TrainedLinear(model.get_submodule(f"0.{name}"), weight_gradient=gradient)  # type: ignore[arg-type]
            model.set_submodule(f"0.{name}", layer)
    if joins:
        assert join_trained(model, names, {"0": model[0]}) == Joined(layers=3, groups=1)
    refresh_weights(model)
    return model


def rows(dtype: torch.dtype = torch.float32, *, tokens: int = 80) -> torch.Tensor:
    return torch.randn(2, tokens // 2, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


def passes(model: torch.nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output, and gradients by name; that of the inputs has none."""
    given = inputs.clone().requires_grad_()
    model.zero_grad()
    output = model(given)
    output.float().sin().sum().backward()
    assert given.grad is not None
    return output.detach(), {"": given.grad} | {
        name: one.grad for name, one in model.named_parameters() if one.grad is not None
    }


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_outputs_and_gradients_of_weights_are_bit_equal(
    kind: str, dtype: torch.dtype, bias: bool
) -> None:
    """Rows have scales of their own; the gradient of the input is summed in another order."""
    wanted_output, wanted = passes(block(kind, dtype=dtype, bias=bias, joins=False), rows(dtype))
    output, found = passes(block(kind, dtype=dtype, bias=bias), rows(dtype))
    assert torch.equal(output, wanted_output)
    assert found.keys() == wanted.keys() and len(found) == 1 + 4 + 4 * bias
    for name in set(wanted) - {""}:
        assert torch.equal(found[name], wanted[name]), name
    exact = passes(block(bias=bias, joins=False), rows())[1]
    assert relative(found[""], exact[""]) < 1.1 * relative(wanted[""], exact[""])


def test_exact_values_are_summed_exactly() -> None:
    """Whole numbers that e4m3 holds: no scale rounds, and the order of a sum does not matter."""
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> torch.Tensor:
        found = torch.randint(-7, 8, shape, generator=generator).float()
        found[:, 0], found[0] = 7.0, 7.0
        return found

    for kind in KINDS:
        apart, joined = block(kind, joins=False, bias=False), block(kind, bias=False)
        for model in (apart, joined):
            generator.manual_seed(0)
            with torch.no_grad():
                for layer in (model[0].one, model[0].two, model[0].three):
                    layer.weight.copy_(whole(*layer.weight.shape))
            refresh_weights(model)
        inputs, results = whole(64, 64), []
        given = [whole(64, out) for out in (64, 32, 96)]
        for model in (apart, joined):
            leaf = inputs.clone().requires_grad_()
            outputs = [layer(leaf) for layer in (model[0].one, model[0].two, model[0].three)]
            torch.autograd.backward(outputs, given)
            weights = [layer.weight.grad for layer in (model[0].one, model[0].two, model[0].three)]
            results.append([*outputs, leaf.grad, *weights])
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True)), kind


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_the_same_objects_and_views_of_one(kind: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block())
    wanted = dict(model.named_parameters())
    values = {name: one.detach().clone() for name, one in wanted.items()}
    names = same_inputs(model, lambda: model(rows()), (torch.nn.Linear,))
    if kind != "plain":
        model[0].one, model[0].two, model[0].three = (
            Fp8TrainedLinear(one) for one in (model[0].one, model[0].two, model[0].three)
        )
    join_trained(model, names, {"0": model[0]})
    refresh_weights(model)
    found = dict(model.named_parameters())
    assert list(found) == sorted(found, key=list(wanted).index)
    assert all(found[name] is wanted[name] and torch.equal(found[name], values[name]) for name in wanted)
    assert set(model.state_dict()) == set(wanted)
    first = model[0].one
    require_views(first.joint_weight, [model[0].one.weight, model[0].two.weight, model[0].three.weight])
    require_views(first.joint_bias, [model[0].one.bias, model[0].two.bias, model[0].three.bias])
    if kind != "plain":
        assert first.values.shape == (192, 64) and first.transposed.shape == (64, 192)
        assert model[0].two.values is None


def require_views(whole: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """The parts lie in the memory of `whole` without a gap, each aligned."""
    place = whole.data_ptr()
    for part in parts:
        assert part.data_ptr() == place and part.is_contiguous() and place % 64 == 0
        place += part.nbytes
    assert place == whole.data_ptr() + whole.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_views_of_one(kind: str) -> None:
    """Autograd takes the slices as they are: no copy."""
    model = block(kind)
    passes(model, rows())
    layers = [model[0].one, model[0].two, model[0].three]
    for name in ("weight", "bias"):
        found = [getattr(layer, name).grad for layer in layers]
        assert len({one.untyped_storage().data_ptr() for one in found}) == 1
        assert all(one.is_contiguous() for one in found)
        assert sum(one.nbytes for one in found) == found[0].untyped_storage().nbytes()
    passes(model, rows())
    first = {name: one.grad.clone() for name, one in model.named_parameters()}
    given = rows().requires_grad_()
    model(given).float().sin().sum().backward()  # a second micro-batch is added
    assert all(relative(one.grad, 2 * first[name]) < ROUNDING for name, one in model.named_parameters())


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("joins", "count"), [(True, 2 * 3), (False, 4 * 3)])
def test_a_group_has_three_products(kind: str, joins: bool, count: int) -> None:
    model = block(kind, joins=joins)
    with Products() as products:
        passes(model, rows())
    assert products.count == count


@pytest.mark.parametrize("kind", KINDS)
def test_the_input_is_kept_once(kind: str) -> None:
    def saved(joins: bool) -> int:
        """Bytes kept for backward of the layers' input, or of its quantised values."""
        model, found = block(kind, joins=joins), dict[int, int]()
        width, inputs = 64, rows(tokens=80)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if kind == "plain" and tensor.untyped_storage().data_ptr() != inputs.untyped_storage().data_ptr():
                return tensor
            if tensor.shape == (80, width) and tensor.element_size() == (4 if kind == "plain" else 1):
                found[tensor.untyped_storage().data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(inputs.requires_grad_())
        return sum(found.values())

    size = 80 * 64 * (4 if kind == "plain" else 1)
    # in FP8 also the other layer's input, which has the same shape
    assert saved(joins=True) == size * (1 if kind == "plain" else 2)
    assert saved(joins=False) == size * (1 if kind == "plain" else 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["inputs", "weight"])
def test_what_is_not_finite_is_seen(kind: str, where: str) -> None:
    model, inputs = block(kind), rows()
    with torch.no_grad():
        if where == "inputs":
            inputs[0, 5, 3] = float("nan")
        else:
            model[0].two.weight[3, 4] = float("nan")
    refresh_weights(model)
    output, found = passes(model, inputs)
    assert not output.isfinite().all() and not found["0.two.weight"].isfinite().all()
    assert not found[""].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_draws_is_each_layer_s_own_weight(kind: str) -> None:
    model = block(kind)
    layers = [model[0].one, model[0].two, model[0].three]
    model.eval()
    with Products() as products, torch.no_grad():
        for layer in reversed(layers):
            wanted = torch.nn.functional.linear(rows(), layer.weight, layer.bias)
            assert torch.equal(layer(rows()), wanted)
    assert products.count == 2 * len(layers)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_follow_their_weights_to_another_value(kind: str) -> None:
    """A step, a checkpoint and a mean write in place, one parameter after another."""
    apart, joined = block(kind, joins=False), block(kind)
    for model in (apart, joined):
        with torch.no_grad():
            values = list(model.parameters())
            torch._foreach_copy_(values, [one.mul(1.5) for one in values])
            values[0].add_(0.25)
        refresh_weights(model)
    assert relative(passes(joined, rows())[0], passes(apart, rows())[0]) < ROUNDING


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_is_replaced_is_found_after_the_next_step(kind: str, name: str) -> None:
    """Else training would go on with what no optimizer writes to."""
    model = block(kind)
    assert follow_weights(model) == (0 if kind == "plain" else 4)
    replaced = getattr(model[0].two, name)
    replaced.data = replaced.data.clone()
    with pytest.raises(AssertionError, match="replaced instead of written in place"):
        follow_weights(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_ends_between_two_layers_leaves_nothing_wrong(kind: str) -> None:
    model, broken = block(kind), rows() * 3
    wanted = passes(block(kind), rows())[0]
    model[0].one(broken)
    model[0].two(broken)
    assert torch.equal(passes(model, rows())[0], wanted)
    assert model[0].one.shared.pending is None and model[0].one.shared.inputs is None


@pytest.mark.parametrize("kind", ["plain", "fp8"])
def test_layers_out_of_order_are_told(kind: str) -> None:
    model = block(kind)
    with pytest.raises(AssertionError, match="called in another order"):
        model[0].two(rows())
    model[0].one(rows())
    with pytest.raises(AssertionError, match="given different ones"):
        model[0].two(rows())


@pytest.mark.parametrize(
    ("kind", "inside"), [("plain", True), ("fp8", False), ("fp8", True), ("bf16", False)]
)
def test_activations_can_be_computed_again_and_blocks_compiled(kind: str, inside: bool, traced: None) -> None:
    wanted_output, wanted = passes(block(kind), rows())
    model = block(kind)
    assert recompute_blocks(repeated_blocks(model, ("Block",)), inside=inside) == 1
    for _ in range(2):
        output, found = passes(model, rows())
        assert torch.equal(output, wanted_output) and difference(found, wanted) == 0.0
    for one in repeated_blocks(model, ("Block",)).values():
        one.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        output, found = passes(model, rows())
        assert relative(output, wanted_output) < ROUNDING and difference(found, wanted) < ROUNDING


@pytest.fixture
def traced() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_with_groups_share_one_graph(kind: str, traced: None) -> None:
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(3)))
    names = same_inputs(model, lambda: model(rows()), (torch.nn.Linear,))
    if kind != "plain":
        for name in [name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)]:
            gradient: WeightGradient = "fp8" if kind == "fp8" else "bf16"
            layer: Any = model.get_submodule(name)
            model.set_submodule(name, Fp8TrainedLinear(layer, weight_gradient=gradient))
    assert join_trained(model, names, repeated_blocks(model, ("Block",))) == Joined(layers=9, groups=3)
    refresh_weights(model)
    wanted_output, wanted = passes(model, rows())
    before = counters["stats"]["unique_graphs"]
    for one in model:
        one.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        output, found = passes(model, rows())
        assert relative(output, wanted_output) < ROUNDING and difference(found, wanted) < ROUNDING
    assert counters["stats"]["unique_graphs"] - before == 1


# what is not joined


@pytest.mark.parametrize(
    "change", ["dtype", "bias", "frozen", "tied", "fp8", "narrow", "class", "outside", "twice"]
)
def test_layers_of_another_kind_stay_single(change: str) -> None:
    model, blocks = torch.nn.Sequential(Block()), ("Block",)
    one = model[0]
    names = [["0.one", "0.two", "0.three"]]
    if change == "dtype":
        one.two, one.three = one.two.double(), one.three.half()
    elif change == "bias":
        one.one.bias, one.three = None, torch.nn.Linear(64, 64).bfloat16()
    elif change == "frozen":
        one.two.weight.requires_grad_(False)
        one.three.bias.requires_grad_(False)
    elif change == "tied":
        one.two.weight = one.three.weight
    elif change == "fp8":
        one.two = Fp8TrainedLinear(one.two)
        one.three = Fp8TrainedLinear(one.three, weight_gradient="bf16")
    elif change == "narrow":
        one.two, one.three = torch.nn.Linear(64, 10), torch.nn.Linear(5, 3)
    elif change == "class":
        one.two, one.three = torch.nn.modules.linear.NonDynamicallyQuantizableLinear(64, 32), one.other
        names = [["0.one", "0.two"]]
    elif change == "outside":
        blocks = ("NoSuchBlock",)
    else:
        names = same_inputs(model, lambda: [one.one(x := rows()), one.one(x), one.two(x)], (torch.nn.Linear,))
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert join_trained(model, names, repeated_blocks(model, blocks)) == Joined(layers=0, groups=0)
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}


def test_those_that_are_alike_are_joined_beside_others() -> None:
    """Layers that are kept as they are, and those in FP8, each among themselves."""
    model = torch.nn.Sequential(Block())
    model[0].two = Fp8TrainedLinear(model[0].two)
    model[0].four = Fp8TrainedLinear(torch.nn.Linear(64, 64))
    names = [["0.one", "0.two", "0.three", "0.four"]]
    assert join_trained(model, names, {"0": model[0]}) == Joined(layers=4, groups=2)
    found = [model[0].one.shared.members, model[0].two.shared.members]
    assert found == [(model[0].one, model[0].three), (model[0].two, model[0].four)]
    refresh_weights(model)
    inputs = rows()
    for layer in (model[0].one, model[0].two, model[0].three, model[0].four):
        layer(inputs)


def test_a_layer_whose_input_has_a_name_stays_single() -> None:
    one = Block()

    def run() -> None:
        x = rows()
        one.one(x)
        one.two(input=x)

    assert same_inputs(one, run, (torch.nn.Linear,)) == [["one"]]
