"""Optional parts come from the checkout, within the pins: another project has our name on the index."""

from __future__ import annotations

import re
import shlex
import tomllib

import pytest

from tests.unit.house.sources import ROOT, name, tracked
from trainer.words import extras

OPTIONAL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", ["", *OPTIONAL])
def test_the_command_installs_the_checkout_within_the_pins(extra: str) -> None:
    words = shlex.split(extras.command(extra))
    assert words[:2] == ["pip", "install"]
    assert words[words.index("-c") + 1] == "constraints.txt"
    assert words[-2:] == ["-e", f".[{extra}]" if extra else "."]
    assert extras.command(extra) in extras.remedy(extra)


def test_in_a_container_the_image_is_built_with_it_and_keeps_the_others() -> None:
    assert extras.remedy("wandb").endswith('--build-arg EXTRAS="nf4 flash-attn-4 wandb"')
    assert extras.remedy("nf4").endswith('--build-arg EXTRAS="nf4 flash-attn-4"')


def test_what_images_have_is_the_dockerfiles_default() -> None:
    defaults = re.findall(r'^ARG EXTRAS="(.*)"$', (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    assert defaults == [" ".join(extras.IN_IMAGES)]


def test_no_file_tells_anybody_to_install_the_index_project_of_our_name() -> None:
    foreign = re.compile(r"""pip install[^\n]*?['" ]trainer\[\w""")
    kinds = {".md", ".py", ".yaml", ".sh", ".toml", ".hcl", ".json", ".txt"}
    files = [path for path in tracked() if path.suffix in kinds]
    assert [name(path) for path in files if foreign.search(path.read_text())] == []
