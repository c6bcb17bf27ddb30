"""Bucket sizes keep to area, multiple and aspect, and every image finds the one that crops it least."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.pictures.buckets import MAX_ASPECT, buckets, nearest_bucket
from trainer.errors import ConfigError

RESOLUTIONS = st.tuples(st.integers(32, 2048), st.sampled_from([8, 16, 32])).filter(
    lambda pair: pair[0] >= pair[1]
)


def test_the_sizes_at_1024() -> None:
    landscape = [size for size in buckets(1024, 16) if size[0] >= size[1]]
    assert landscape == [
        (1024, 1024),
        (1088, 960),
        (1152, 896),
        (1216, 848),
        (1280, 816),
        (1344, 768),
        (1408, 736),
    ]


@given(RESOLUTIONS)
def test_sides_area_aspect_and_symmetry(pair: tuple[int, int]) -> None:
    resolution, multiple = pair
    sizes = buckets(resolution, multiple)
    base = resolution // multiple * multiple
    assert (base, base) in sizes
    assert sizes == tuple(sorted(set(sizes)))
    for width, height in sizes:
        assert width % multiple == 0 and height % multiple == 0
        assert width * height <= resolution**2
        assert max(width, height) <= MAX_ASPECT * min(width, height)
        assert (height, width) in sizes
        # a longer short side would not fit, or would pass the square
        long, short = max(width, height), min(width, height)
        assert long * (short + multiple) > resolution**2 or short + multiple > long


@given(RESOLUTIONS, st.integers(16, 4000), st.integers(16, 4000))
def test_the_nearest_bucket_crops_least(pair: tuple[int, int], width: int, height: int) -> None:
    sizes = buckets(*pair)

    def kept(size: tuple[int, int]) -> float:
        scale = max(size[0] / width, size[1] / height)
        return size[0] * size[1] / (width * scale * height * scale)

    chosen = nearest_bucket(width, height, sizes)
    assert kept(chosen) == pytest.approx(max(kept(size) for size in sizes))


@given(st.integers(16, 4000), st.integers(16, 4000))
def test_a_turned_image_gets_the_turned_bucket(width: int, height: int) -> None:
    sizes = buckets(512, 16)
    across, along = nearest_bucket(width, height, sizes), nearest_bucket(height, width, sizes)
    ties = [
        s for s in sizes if math.isclose(abs(math.log(s[0] / s[1])), abs(math.log(across[0] / across[1])))
    ]
    assert across == along[::-1] or len(ties) > 2


def test_of_equal_shapes_the_largest_is_taken() -> None:
    assert nearest_bucket(100, 100, [(32, 32), (64, 64), (48, 48)]) == (64, 64)


def test_a_resolution_below_the_multiple_is_told() -> None:
    with pytest.raises(ConfigError, match=r"data\.resolution: 16 is smaller than 32"):
        buckets(16, 32)
