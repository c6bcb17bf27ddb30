"""bench rows: the products that it tries, and how it prints numbers of rows."""

from __future__ import annotations

import pytest

from bench.rows import products, spans, weights


@pytest.mark.parametrize(
    ("family", "some"),
    [
        # single layers, and queries, keys and values joined
        ("qwen_image", {(3072, 3072), (12288, 3072), (3072, 12288), (9216, 3072)}),
        ("flux1_dev", {(3072, 15360), (9216, 3072)}),
        ("flux2_dev", {(55296, 6144), (18432, 6144), (6144, 24576)}),
        ("kandinsky5", {(10240, 2560), (7680, 2560), (5120, 2560)}),
        ("llama", {(14336, 4096), (6144, 4096), (28672, 4096)}),
    ],
)
def test_weights_are_those_of_full_size_layers_single_and_joined(
    family: str, some: set[tuple[int, int]]
) -> None:
    assert some <= weights(family)
    # embedders and last layers are not multiplied in FP8
    assert all(min(size) >= 1024 for size in weights(family))


def test_a_gradient_s_product_is_that_of_the_other_side() -> None:
    found = products(["qwen_image"])
    assert (3072, 9216) in found and (9216, 3072) in found and found == sorted(set(found))


@pytest.mark.parametrize(
    ("numbers", "printed"),
    [
        ([], ""),
        ([7], "7"),
        ([1, 2, 3, 17, 18, 19], "1-3, 17-19"),
        ([3, 9, 15, 20], "3-15 step 6, 20"),
    ],
)
def test_numbers_are_printed_as_spans(numbers: list[int], printed: str) -> None:
    assert spans(numbers) == printed
