"""Figures of generated pictures from features: rows of vectors, one a picture. Nothing is loaded here."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

KID_SUBSETS = 100
KID_MOST_IN_SUBSET = 1000
_KID_SEED = 2020
"""The numbers of subsets, of pictures in one, and the seed are torch-fidelity's defaults."""


def cosines(one: Tensor, other: Tensor) -> Tensor:
    """Cosines of every row (n, d) with every row (m, d): (n, m), float64, equal rows at 1."""
    return normalize(one.double(), dim=1) @ normalize(other.double(), dim=1).T


def clip_t(pictures: Tensor, prompts: Tensor) -> float:
    """CLIP-T: mean cosine of picture and prompt, row by row of (n, d) each.

    Source: DreamBooth, https://arxiv.org/abs/2208.12242, section 5.
    """
    return float(cosines(pictures, prompts).diagonal().mean())


def likeness(generated: Tensor, training: Tensor) -> float:
    """Mean cosine over all pairs of a generated (n, d) and a training picture (m, d).

    Source: the DINO metric of DreamBooth, with features of DINOv2.
    """
    return float(cosines(generated, training).mean())


def nearest(generated: Tensor, training: Tensor) -> tuple[list[float], list[int]]:
    """Of every generated picture the highest cosine to a training picture, and that one's row."""
    found = cosines(generated, training).max(dim=1)
    return found.values.tolist(), found.indices.tolist()


def diversity(features: Tensor, prompts: Sequence[Hashable]) -> float | None:
    """Mean distance, 1 - cosine, over all pairs of pictures (n, d) of one prompt; None without a pair.

    Source: DIV of DreamBooth, with features in place of LPIPS.
    """
    groups = [[row for row, other in enumerate(prompts) if other == prompt] for prompt in {*prompts}]
    means = []
    for rows in groups:
        if len(rows) > 1:
            own = cosines(features[rows], features[rows])
            above = torch.triu_indices(len(rows), len(rows), offset=1)
            means.append(1 - own[above[0], above[1]])
    return float(torch.cat(means).mean()) if means else None


def kid_subset(count: int, others: int) -> int:
    """Pictures in a subset of KID: half of the smaller set, so that two subsets differ; 1000 at most."""
    return min(KID_MOST_IN_SUBSET, min(count, others) // 2)


def kid(generated: Tensor, training: Tensor, subset: int) -> tuple[float, float]:
    """Kernel inception distance of features (n, d) and (m, d): mean and standard deviation over 100 subsets
    of `subset` rows of each, drawn without replacement.

    The unbiased MMD^2 of the kernel (x.y / d + 1)^3; it may be a little below zero. Source:
    https://arxiv.org/abs/1801.01401, section 4; seeds and defaults as torch-fidelity's.
    """
    one, other = generated.double().numpy(), training.double().numpy()
    drawn, found = np.random.RandomState(_KID_SEED), []
    for _ in range(KID_SUBSETS):
        first = one[drawn.choice(len(one), subset, replace=False)]
        second = other[drawn.choice(len(other), subset, replace=False)]
        found.append(_unbiased_mmd(first, second))
    return float(np.mean(found)), float(np.std(found))


def _unbiased_mmd(one: np.ndarray, other: np.ndarray) -> float:
    """MMD^2 of two sets of n rows, without the pairs of a row with itself."""
    count, size = one.shape
    within = 0.0
    for rows in (one, other):
        kernel = (rows @ rows.T / size + 1) ** 3
        within += (kernel.sum() - np.trace(kernel)) / (count * (count - 1))
    return float(within - 2 * ((one @ other.T / size + 1) ** 3).mean())


def fid(generated: Tensor, training: Tensor) -> float:
    """Frechet distance of two normal distributions with the mean and covariance of features (n, d), (m, d).

    Source: https://arxiv.org/abs/1706.08500, equation 6.
    """
    (mean, spread), (other_mean, other_spread) = (
        (rows.mean(dim=0), torch.cov(rows.T)) for rows in (generated.double(), training.double())
    )
    # the trace of the root of a product is the sum of the roots of its eigenvalues, none of them negative
    roots = torch.linalg.eigvals(spread @ other_spread).sqrt().real.sum()
    between = (mean - other_mean).square().sum()
    return float(between + spread.trace() + other_spread.trace() - 2 * roots)
