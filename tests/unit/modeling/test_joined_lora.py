"""LoRA layers of one input computed as one: which they are, that nothing else changes, and the way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import Linear as LoraLinear

from tests.unit.modeling.small_models import Case, Storage, case, difference, relative
from trainer.modeling.adapter import joined_lora
from trainer.modeling.adapter.joined_lora import join_siblings, part_siblings
from trainer.modeling.adapter.lora import ADAPTER, adapter_state, remove_lora
from trainer.modeling.adapter.low_rank import add_low_rank

# suffixes of what is joined, in the order of the calls, and how many such groups each model has
GROUPS: dict[str, list[tuple[tuple[str, ...], int]]] = {
    "flux1_dev": [
        (("attn.to_q", "attn.to_k", "attn.to_v"), 3),
        (("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), 1),
    ],
    "qwen_image": [
        (("attn.to_q", "attn.to_k", "attn.to_v"), 2),
        (("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), 2),
    ],
    "kandinsky5": [
        (("self_attention.to_query", "self_attention.to_key", "self_attention.to_value"), 3),
        (("cross_attention.to_key", "cross_attention.to_value"), 2),
    ],
    "llama": [(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), 2)],
}
GROUPS["qwen2"] = GROUPS["qwen3"] = GROUPS["llama"]
FAMILIES = sorted(GROUPS)
# of sums in fp32 that are made in another order
ROUNDING = 1e-5


def groups(model: Any) -> list[tuple[str, ...]]:
    """Names of the layers of every group, in their order."""
    names = {id(module): name for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    firsts = [m for m in model.modules() if isinstance(m, LoraLinear) and "joint_weight" in m._buffers]
    return [
        tuple(names[id(member)] for member in first.shared.members)
        for first in firsts
        if type(first) is not LoraLinear
    ]


def joined(family: str, storage: Storage = "plain", **options: Any) -> Case:
    found = case(family, storage=storage, **options)
    assert join_siblings(found.model, found.predict) > 0
    return found


class TwoInputs(torch.nn.Module):
    """Four linears: two of one input, one of another, one that is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.other, self.again = (torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, *, repeat: int = 1) -> torch.Tensor:
        hidden = self.one(x) * self.two(x) + self.other(x + 1)
        for _ in range(repeat):
            hidden = hidden + self.again(x)
        return hidden


def adapted(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """`model` under a LoRA by peft, with other options than `add_lora` has."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=2, target_modules=["one", "two", "other", "again"], **options)
    torch.manual_seed(0)
    return inject_adapter_in_model(config, model.requires_grad_(False), adapter_name=ADAPTER)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_one_input_and_one_parent_are_joined(family: str) -> None:
    """The query of a cross attention reads something else than its key and value."""
    model = joined(family).model
    found = groups(model)
    for suffixes, count in GROUPS[family]:
        same = [g for g in found if len(g) == len(suffixes) and all(map(str.endswith, g, suffixes))]
        assert len(same) == count
    assert len(found) == sum(count for _, count in GROUPS[family])
    assert all(len({name.rpartition(".")[0] for name in group}) == 1 for group in found)


def test_the_number_of_joined_layers_is_returned() -> None:
    one = case("flux1_dev")
    assert join_siblings(one.model, one.predict) == 3 * 3 + 3
    assert join_siblings(one.model, one.predict) == 0


def test_both_halves_of_a_gated_mlp_are_joined() -> None:
    found = groups(joined("llama", preset="all-linear").model)
    assert ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj") in found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("preset", ["attention", "all-linear"])
def test_outputs_and_gradients_stay(family: str, preset: str) -> None:
    wanted_output, wanted = case(family, preset=preset).gradients()
    model = joined(family, preset=preset)
    for _ in range(2):  # nothing is left over from the first pass
        output, found = model.gradients()
        assert relative(output, wanted_output) < ROUNDING
        assert difference(found, wanted) < ROUNDING


@pytest.mark.parametrize("family", ["flux1_dev", "llama"])
def test_an_int8_base_computes_the_same_joined(family: str) -> None:
    wanted_output, wanted = case(family, storage="int8").gradients()
    output, found = joined(family, "int8").gradients()
    assert relative(output, wanted_output) < ROUNDING
    assert difference(found, wanted) < ROUNDING


@pytest.mark.parametrize("family", ["flux1_dev", "llama"])
@pytest.mark.parametrize("storage", ["fp8", "fp8_two_copies"])
def test_an_fp8_base_computes_nearly_the_same_joined(family: str, storage: Storage) -> None:
    """Gradients of all members share one scale a token: other roundings, equally good ones."""
    exact = case(family).gradients()[1]
    wanted_output, wanted = case(family, storage=storage).gradients()
    output, found = joined(family, storage).gradients()
    assert relative(output, wanted_output) < 1e-5
    assert difference(found, wanted) < 0.06
    assert difference(found, exact) < 1.2 * difference(wanted, exact)


@pytest.mark.parametrize("storage", ["plain", "int8", "fp8", "fp8_two_copies"])
def test_weights_are_views_of_the_wide_one(storage: Storage) -> None:
    model = joined("flux1_dev", storage).model
    for names in groups(model):
        layers = [model.get_submodule(name) for name in names]
        first, bases = layers[0], [layer.base_layer for layer in layers]
        one_after_another(first.joint_weight, [base.weight for base in bases])
        one_after_another(first.joint_bias, [base.bias for base in bases])
        if storage != "plain":
            one_after_another(first.joint_scale, [base.weight_scale for base in bases])
        if storage == "fp8_two_copies":
            assert torch.equal(first.joint_transposed, first.joint_weight.t())
            storages = {base.transposed.untyped_storage().data_ptr() for base in bases}
            assert storages == {first.joint_transposed.untyped_storage().data_ptr()}
            assert all(torch.equal(base.transposed, base.weight.t()) for base in bases)


def one_after_another(whole: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """The parts lie in the memory of `whole`, without a gap, and are all of it."""
    place = whole.data_ptr()
    for part in parts:
        assert part.data_ptr() == place and part.is_contiguous()
        place += part.numel() * part.element_size()
    assert place == whole.data_ptr() + whole.numel() * whole.element_size()
    assert whole.untyped_storage().nbytes() == whole.numel() * whole.element_size()


def test_joined_tensors_are_neither_parameters_nor_saved() -> None:
    plain, model = case("flux1_dev").model, joined("flux1_dev").model
    assert set(model.state_dict()) == set(plain.state_dict())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    found, wanted = adapter_state(model), adapter_state(plain)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("storage", ["plain", "int8", "fp8_two_copies"])
def test_parted_layers_are_plain_ones_again(storage: Storage) -> None:
    wanted_output, wanted = case("flux1_dev", storage=storage).gradients()
    parted = joined("flux1_dev", storage)
    part_siblings(parted.model)
    adapters = [module for module in parted.model.modules() if isinstance(module, LoraLinear)]
    assert adapters and all(type(module) is LoraLinear for module in adapters)
    assert not any("shared" in vars(module) for module in adapters)
    output, found = parted.gradients()
    assert torch.equal(output, wanted_output)
    assert difference(found, wanted) == 0.0
    assert join_siblings(parted.model, parted.predict) == 12


def test_parting_frees_what_only_a_group_needs() -> None:
    """A wide weight must not outlive the group once its members get weights of their own."""
    model = joined("flux1_dev", "fp8_two_copies").model
    part_siblings(model)
    assert not [name for name, _ in model.named_buffers() if ".joint_" in name]


@pytest.mark.parametrize("storage", ["plain", "fp8"])
def test_a_disabled_adapter_gives_the_base(storage: Storage) -> None:
    base = case("flux1_dev", storage=storage, adapted=False)
    model = joined("flux1_dev", storage)
    with torch.no_grad():
        wanted, changed = base.predict(), model.predict()
        model.model.disable_adapters()
        assert relative(model.predict(), wanted) < ROUNDING
        model.model.enable_adapters()
        assert torch.equal(model.predict(), changed)
    assert relative(changed, wanted) > 1e-3


def test_an_adapter_can_be_removed_after_parting() -> None:
    base, model = case("flux1_dev", adapted=False), joined("flux1_dev")
    part_siblings(model.model)
    remove_lora(model.model)
    with torch.no_grad():
        assert torch.equal(model.predict(), base.predict())


def test_layers_follow_their_weights_to_another_value() -> None:
    """A checkpoint's or a master's values are copied into the parameters; the product must see them."""
    plain, model = case("flux1_dev"), joined("flux1_dev")
    with torch.no_grad():
        for one in (plain.model, model.model):
            for name, parameter in one.named_parameters():
                if "lora_" in name or name.endswith("to_k.base_layer.weight"):
                    parameter.mul_(1.5)
        assert relative(model.predict(), plain.predict()) < ROUNDING


# what is not joined


def test_a_layer_that_is_called_twice_stays_single() -> None:
    model, x = adapted(TwoInputs()), torch.randn(3, 8)
    wanted = model(x, repeat=2)
    assert join_siblings(model, lambda: model(x, repeat=2)) == 0
    assert relative(model(x, repeat=2), wanted) < ROUNDING
    assert join_siblings(model, lambda: model(x)) == 3
    assert groups(model) == [("one", "two", "again")]


def test_a_layer_without_siblings_adds_its_product_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[tuple[int, ...]] = []

    def counted(whole: torch.Tensor, hidden: torch.Tensor, *ups: torch.Tensor) -> torch.Tensor:
        added.append((len(ups), *ups[0].shape))
        return add_low_rank(whole, hidden, *ups)

    monkeypatch.setattr(joined_lora, "add_low_rank", counted)
    one = joined("flux1_dev")
    one.predict()
    # query, key and value of each of four streams of tokens; the two outputs of the block that has them
    width, rank = 64, 4
    assert sorted(added) == [(1, width, rank)] * 2 + [(3, width, rank)] * 4
    part_siblings(one.model)
    added.clear()
    one.predict()
    assert not added


@pytest.mark.parametrize(
    "options",
    [
        {"alpha_pattern": {"two": 3.0, "again": 5.0}},
        {"lora_dropout": 0.5},
        {"use_dora": True},
    ],
    ids=["alpha", "dropout", "variant"],
)
def test_adapters_of_another_kind_stay_single(options: dict[str, Any]) -> None:
    model, x = adapted(TwoInputs(), **options), torch.randn(3, 8)
    assert join_siblings(model, lambda: model(x)) == 0


def test_ranks_may_differ() -> None:
    """With scales that are equal all the same."""
    options = {"rank_pattern": {"two": 5}, "alpha_pattern": {"two": 20.0}, "lora_alpha": 8}
    model, x = adapted(TwoInputs(), init_lora_weights=False, **options), torch.randn(3, 8)
    wanted = model(x)
    assert join_siblings(model, lambda: model(x)) == 3
    assert relative(model(x), wanted) < ROUNDING


@pytest.mark.parametrize("change", ["dtype", "bias", "storage"])
def test_bases_of_another_kind_stay_single(change: str) -> None:
    from tests.quantized_layers import from_linear

    plain = TwoInputs()
    if change == "dtype":
        for layer in (plain.two, plain.again):
            layer.weight.data = layer.weight.data.double()
    elif change == "bias":
        plain.two.bias = plain.again.bias = None
    else:
        plain.two = from_linear(plain.two, "int8", fp8_compute=False, copies=1)
        plain.again = from_linear(plain.again, "fp8", fp8_compute=False, copies=1)
    model, x = adapted(plain), torch.randn(3, 8)

    def run() -> None:
        # only who is given what counts
        for layer in (model.one, model.two, model.again):
            if change == "dtype" and layer is not model.one:
                for hook in layer._forward_pre_hooks.values():
                    hook(layer, (x,))
            else:
                layer(x)

    assert join_siblings(model, run) == 0


def test_hooks_are_gone_after_a_pass_that_fails() -> None:
    model = adapted(TwoInputs())

    def fail() -> None:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        join_siblings(model, fail)
    assert not any(module._forward_pre_hooks for module in model.modules())
