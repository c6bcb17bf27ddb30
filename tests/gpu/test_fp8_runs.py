"""Full fine-tunes in FP8 by the command line: products are proved, losses are bf16's, files load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.contract.runs import Case, Workshop, numbers, small_samples
from tests.gpu.command_line import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs FP8 units"
    ),
]
QUICK = (
    "validation.held_out=1",
    "validation.every_steps=4",
    "validation.prompts=[]",
    "train.learning_rate=1e-4",
)


@pytest.fixture(scope="module")
def workshop(tiny_base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("workshop")
    return Workshop(base=tiny_base, samples=small_samples(folder / "samples"), cache=folder / "cache")


def trained(workshop: Workshop, family: str, folder: Path, *overrides: str) -> tuple[str, list[float]]:
    """Words of a run by the command line, and its losses."""
    case = Case(family=family, method="full")
    said = train(workshop, case, folder, 1, *QUICK, *overrides)
    return said, [row["loss"] for row in numbers(folder / "run") if "loss" in row]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("compiled", ["false", "true"], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", ["flux1_dev", "llama"])
def test_a_run_in_fp8_beside_one_in_bf16(
    family: str, compiled: str, workshop: Workshop, tmp_path: Path
) -> None:
    option = f"features.compile={compiled}"
    _, wanted = trained(workshop, family, tmp_path / "bf16", option, "features.compute=bf16")
    said, found = trained(workshop, family, tmp_path / "fp8", option, "features.compute=fp8")
    assert "products of one micro-batch ran in FP8, as counted" in said
    assert "gradients of weights in fp8" in said
    assert found == pytest.approx(wanted, rel=0.02)
    said, _ = trained(
        workshop,
        family,
        tmp_path / "gradient",
        option,
        "features.compute=fp8",
        "features.weight_gradient=bf16",
    )
    assert "gradients of weights in bf16" in said
