"""Metrics of pictures against transformers, torch-fidelity and plain formulas."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.scoring_models import CAPTIONS, noise, write_clip, write_dinov2, write_pairs
from trainer.engine.scoring import measures, models
from trainer.engine.scoring.score import METRICS, Picture, Scorer
from trainer.errors import AccessError, ConfigError


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip") / "clip", steps=150)


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dinov2(tmp_path_factory.mktemp("dinov2") / "dinov2")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[Picture]:
    paths = write_pairs(tmp_path_factory.mktemp("pairs") / "pairs")
    return [
        Picture(path=path, name=path.name, prompt=text) for path, text in zip(paths, CAPTIONS, strict=True)
    ]


def scorer(
    clip: Path | None, dinov2: Path | None, training: list[Picture], threshold: float = 0.95
) -> Scorer:
    return Scorer(
        clip=None if clip is None else models.resolve("clip", str(clip), "--clip"),
        dinov2=None if dinov2 is None else models.resolve("dinov2", str(dinov2), "--dinov2"),
        training=training,
        threshold=threshold,
    )


def unprompted(paths: list[Path]) -> list[Picture]:
    return [Picture(path=path, name=path.name) for path in paths]


def test_a_trained_clip_ranks_its_own_captions_first(clip: Path, pairs: list[Picture]) -> None:
    model = models.resolve("clip", str(clip), "--clip")
    with models.loaded(model) as features:
        pictures = features.of_pictures([one.opened for one in pairs], lambda: None)
        texts, cut = features.of_texts(CAPTIONS, lambda: None)
    ranked = measures.cosines(pictures, texts).argmax(dim=1)
    assert ranked.tolist() == list(range(len(CAPTIONS)))
    assert cut == 0
    own = scorer(clip, None, []).scores(pairs, ["clip_t"]).values["clip_t"]
    turned = [
        Picture(path=one.path, name=one.name, prompt=other)
        for one, other in zip(pairs, (*CAPTIONS[7:], *CAPTIONS[:7]), strict=True)
    ]
    assert scorer(clip, None, []).scores(turned, ["clip_t"]).values["clip_t"] < own - 0.2


def test_clip_t_is_that_of_transformers_forward_pass(clip: Path, pairs: list[Picture]) -> None:
    from transformers import AutoProcessor, CLIPModel

    network, processor = CLIPModel.from_pretrained(clip).eval(), AutoProcessor.from_pretrained(clip)
    images = [Image.open(one.path).convert("RGB") for one in pairs]
    given = processor(text=list(CAPTIONS), images=images, return_tensors="pt", padding=True)
    with torch.no_grad():
        said = network(**given)
        expected = (said.logits_per_image.diagonal() / network.logit_scale.exp()).mean()
    found = scorer(clip, None, []).scores(pairs, ["clip_t"]).values["clip_t"]
    assert found == pytest.approx(float(expected), abs=1e-5)


def test_long_prompts_are_cut_and_counted(clip: Path, pairs: list[Picture]) -> None:
    long = Picture(path=pairs[0].path, name="long", prompt="a red square " * 40)
    assert scorer(clip, None, []).scores([pairs[0], long], ["clip_t"]).cut_prompts == 1


def test_dinov2_features_are_those_of_transformers(dinov2: Path, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor, Dinov2Model

    paths = noise(tmp_path / "noise", range(11))  # more than a batch
    network, processor = (
        Dinov2Model.from_pretrained(dinov2).eval(),
        AutoImageProcessor.from_pretrained(dinov2),
    )
    pixels = processor(images=[Image.open(path) for path in paths], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        expected = network(pixels).last_hidden_state[:, 0]
    with models.loaded(models.resolve("dinov2", str(dinov2), "--dinov2")) as features:
        found = features.of_pictures([one.opened for one in unprompted(paths)], lambda: None)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_identical_pictures_are_alike_to_one_and_copies_alarm(dinov2: Path, tmp_path: Path) -> None:
    training = unprompted(noise(tmp_path / "training", range(20)))
    one = scorer(None, dinov2, training[:1]).scores(training[:1], ["dinov2", "nearest_train"])
    assert one.values == {
        "dinov2": pytest.approx(1.0, abs=1e-6),
        "nearest_train": pytest.approx(1.0, abs=1e-6),
    }

    folder = tmp_path / "drawn"
    drawn = noise(folder, range(100, 105))
    shutil.copy(training[13].path, folder / "200.png")
    with Image.open(training[4].path) as picture:  # saved anew, a little darker
        picture.point(lambda value: max(0, value - 2)).save(folder / "201.png")
    pictures = unprompted([*drawn, folder / "200.png", folder / "201.png"])
    found = scorer(None, dinov2, training, threshold=0.98).scores(pictures, ["nearest_train"])
    copies = {copy.picture: copy.training for copy in found.copies}
    assert copies == {"200.png": training[13].name, "201.png": training[4].name}
    assert found.values["nearest_train"] == max(one.cosine for one in found.nearest)


def test_diversity_is_the_mean_over_pairs_of_one_prompt() -> None:
    rows = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    prompts = ["a", "b", "a", "c", "b", "a", "a"]
    pairs = [(i, j) for i, j in itertools.combinations(range(7), 2) if prompts[i] == prompts[j]]
    cosine = torch.nn.CosineSimilarity(dim=0)
    expected = sum(1 - float(cosine(rows[i], rows[j])) for i, j in pairs) / len(pairs)
    assert measures.diversity(rows, prompts) == pytest.approx(expected, rel=1e-12)
    assert measures.diversity(rows[:2], ["a", "b"]) is None
    assert measures.diversity(rows[[0, 0]], ["a", "a"]) == pytest.approx(0.0, abs=1e-12)


def mmd_by_loops(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """The unbiased estimate of https://arxiv.org/abs/1801.01401, equation 3, term by term."""

    def kernel(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> float:
        return float((sum(a * b for a, b in zip(x, y, strict=True)) / len(x) + 1) ** 3)

    n, m = len(one), len(other)
    within = sum(kernel(one[i], one[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    within += sum(kernel(other[i], other[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    between = sum(kernel(x, y) for x in one for y in other) / (n * m)
    return within - 2 * between


def arrays(count: int, others: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(5)
    one = torch.randn(count, width, generator=drawn, dtype=torch.float64)
    return one, 1.2 * torch.randn(others, width, generator=drawn, dtype=torch.float64) + 0.3


def test_kid_of_whole_sets_is_the_sum_over_pairs() -> None:
    """A subset of all pictures is the set itself, so that every one of the subsets has the same value."""
    one, other = arrays(12, 12, 6)
    mean, deviation = measures.kid(one, other, 12)
    assert mean == pytest.approx(mmd_by_loops(one.numpy(), other.numpy()), rel=1e-9)
    assert deviation == pytest.approx(0.0, abs=1e-9)


def test_kid_is_near_zero_for_equal_distributions_and_its_subsets_differ() -> None:
    drawn = torch.Generator().manual_seed(9)
    one, other = (torch.randn(200, 16, generator=drawn) for _ in range(2))
    mean, deviation = measures.kid(one, other, measures.kid_subset(200, 200))
    far, _ = measures.kid(one, other + 1, measures.kid_subset(200, 200))
    assert abs(mean) < 3 * deviation / 10 + 0.05 < far
    assert deviation > 0
    assert measures.kid_subset(60, 51) == 25 and measures.kid_subset(9000, 9000) == 1000


def test_kid_and_fid_are_torch_fidelitys_on_the_same_arrays() -> None:
    kid = pytest.importorskip("torch_fidelity.metric_kid")
    fid = pytest.importorskip("torch_fidelity.metric_fid")
    one, other = arrays(80, 70, 24)
    for subset in (20, 35):
        said = kid.kid_features_to_metric(one, other, kid_subset_size=subset, verbose=False)
        mean, deviation = measures.kid(one, other, subset)
        assert mean == pytest.approx(said["kernel_inception_distance_mean"], rel=1e-9)
        assert deviation == pytest.approx(said["kernel_inception_distance_std"], rel=1e-9)
    statistics = [fid.fid_features_to_statistics(rows) for rows in (one, other)]
    expected = fid.fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    assert measures.fid(one, other) == pytest.approx(expected, rel=1e-9)


def test_fid_of_normal_distributions_of_one_dimension_is_the_closed_form() -> None:
    one, other = arrays(500, 400, 2)
    spread = [np.diag(np.cov(rows.numpy().T)) for rows in (one, other)]
    apart = [torch.stack([rows[:, 0], torch.zeros(len(rows))], dim=1) for rows in (one, other)]
    means = [float(rows[:, 0].mean()) for rows in (one, other)]
    expected = (means[0] - means[1]) ** 2 + (spread[0][0] ** 0.5 - spread[1][0] ** 0.5) ** 2
    assert measures.fid(*apart) == pytest.approx(expected, rel=1e-9)


def test_metrics_that_would_mean_nothing_are_refused_with_what_is_needed(
    dinov2: Path, tmp_path: Path
) -> None:
    training = unprompted(noise(tmp_path / "training", range(60)))
    pictures = unprompted(noise(tmp_path / "drawn", range(100, 149)))
    found = scorer(None, dinov2, training).scores(pictures, METRICS)
    assert found.values.keys() == {"dinov2", "nearest_train"}
    assert found.refused["kid"].startswith("49 pictures, and 50 are needed: ")
    assert found.refused["fid"].startswith("49 pictures, and 10,000 are needed: ")
    assert found.refused["clip_t"] == "the pictures have no prompts"
    assert found.refused["diversity"].startswith("no prompt has two pictures")
    more = [*pictures, *unprompted(noise(tmp_path / "drawn", [149]))]
    assert scorer(None, dinov2, training).scores(more, ["kid"]).values.keys() == {"kid", "kid_std"}
    few = scorer(None, dinov2, training[:49]).scores(more, ["kid"])
    assert few.refused["kid"].startswith("49 training pictures, and 50 are needed")
    none = scorer(None, dinov2, []).scores(more, ["dinov2"])
    assert none.refused["dinov2"] == "there are no training pictures"


def test_models_that_are_not_there_or_of_another_kind_are_told(
    clip: Path, dinov2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    with pytest.raises(
        ConfigError, match=r"(?s)validation.clip_model: .*no/such/folder does not exist.*OWNER"
    ):
        models.resolve("clip", "no/such/folder", "validation.clip_model")
    with pytest.raises(AccessError, match=r"--dinov2: .* holds a model of type clip"):
        models.resolve("dinov2", str(clip), "--dinov2")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(AccessError, match=r"(?s)--clip: owner/name is not complete.*HF_HUB_OFFLINE forbids"):
        models.resolve("clip", "owner/name", "--clip")
    bare = Path(shutil.copytree(dinov2, tmp_path / "bare"))
    next(bare.glob("*.safetensors")).unlink()
    with pytest.raises(AccessError, match=r"no \.safetensors file"):
        models.resolve("dinov2", str(bare), "--dinov2")


def test_weights_that_lack_tensors_are_refused(dinov2: Path, tmp_path: Path) -> None:
    """Transformers would fill them with random values and a warning."""
    from safetensors.torch import load_file, save_file

    half = Path(shutil.copytree(dinov2, tmp_path / "half"))
    (file,) = half.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["layernorm.weight"]
    save_file(tensors, file, {"format": "pt"})
    model = models.resolve("dinov2", str(half), "--dinov2")
    said = pytest.raises(AccessError, match=r"the weights lack 1 tensor, first layernorm\.weight")
    with said, models.loaded(model):
        pass
