"""The place of a process among those of a launcher, by its variables, and the number of processes by both."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from trainer.cli.options import Layers
from trainer.config.launchers import Launch, found
from trainer.config.reading.load import Loaded
from trainer.errors import ConfigError

PLACE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = {
    **PLACE,
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
ACCELERATE = {"ACCELERATE_DYNAMO_MODE": "default", "ACCELERATE_USE_CPU": "True"}


@pytest.mark.parametrize("environ", [TORCHRUN, {**ACCELERATE, **TORCHRUN}, PLACE], ids=lambda one: len(one))
def test_a_launcher_gives_each_process_its_place(environ: dict[str, str]) -> None:
    launch = found(environ)
    assert (launch.rank, launch.size, launch.source) == (1, 2, "WORLD_SIZE")
    assert len(launch.name) == 8
    first = found({**environ, "RANK": "0", "LOCAL_RANK": "0"})
    assert (first.rank, first.name) == (0, launch.name)


@pytest.mark.parametrize(
    ("name", "value"),
    [("TORCHELASTIC_RESTART_COUNT", "1"), ("MASTER_PORT", "29501"), ("TORCHELASTIC_RUN_ID", "other")],
)
def test_another_start_and_another_try_have_another_name(name: str, value: str) -> None:
    assert found({**TORCHRUN, name: value}).name != found(TORCHRUN).name


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "tcp://10.0.0.2:29500"},  # a Service named master
        {"WORLD_SIZE": "4"},
        {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "job-0",
            "MASTER_PORT": "23456",
        },  # a cluster's one pod
        {"PET_NNODES": "2", "PET_NODE_RANK": "0"},
        {"LOCAL_RANK": "", "RANK": ""},
        {"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_CPU": "True"},
        {"TORCHELASTIC_MAX_RESTARTS": "3", "LOCAL_WORLD_SIZE": "2"},
    ],
    ids=str,
)
def test_variables_that_prove_no_launcher_change_nothing(environ: dict[str, str]) -> None:
    assert found(environ) == Launch()


def without(name: str) -> dict[str, str]:
    return {one: value for one, value in TORCHRUN.items() if one != name}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "RANK: RANK is set, and WORLD_SIZE is not"),
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK: LOCAL_RANK is set, and RANK is not"),
        (without("WORLD_SIZE"), "TORCHELASTIC_RUN_ID is set, and WORLD_SIZE is not"),
        (without("LOCAL_RANK"), "TORCHELASTIC_RUN_ID is set, and LOCAL_RANK is not"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, 'WORLD_SIZE: "two" is not a number of processes'),
        ({**TORCHRUN, "RANK": "2", "LOCAL_RANK": "2"}, "RANK=2, LOCAL_RANK=2, WORLD_SIZE=2"),
        ({**TORCHRUN, "LOCAL_RANK": "0"}, "RANK=1, LOCAL_RANK=0"),  # torchrun --virtual-local-rank
        ({**TORCHRUN, "WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE below WORLD_SIZE: processes on several machines"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE without LOCAL_RANK: processes on several machines"),
        ({**ACCELERATE, "MASTER_ADDR": "127.0.0.1"}, "told to start several processes, and started one"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_places_that_cannot_be_are_refused_with_their_names(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        found(environ)
    assert words in str(caught.value)


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    file = tmp_path / "c.yaml"
    file.write_text("family: flux1_dev\ndata: {sets: [{img_dir: images}]}\noutput_dir: out\n")
    return Layers((file,)).load()


def written(loaded: Loaded, gpus: int) -> Loaded:
    parallel = loaded.config.parallel.model_copy(update={"gpus": gpus})
    config = loaded.config.model_copy(update={"parallel": parallel})
    return dataclasses.replace(loaded, config=config, sources={**loaded.sources, "parallel.gpus": "c.yaml:4"})


def test_auto_is_the_launchers_number(loaded: Loaded) -> None:
    assert Launch().reconciled(loaded) is loaded
    for launch in (found(TORCHRUN), found(ACCELERATE)):
        agreed = launch.reconciled(loaded)
        assert agreed.config.parallel.gpus == launch.size
        assert agreed.sources["parallel.gpus"] == launch.source
        assert launch.reconciled(written(loaded, launch.size)).sources["parallel.gpus"] == "c.yaml:4"


@pytest.mark.parametrize(
    ("environ", "gpus", "words"),
    [
        (TORCHRUN, 4, "c.yaml:4: parallel.gpus is 4, and the launcher started 2 (by WORLD_SIZE)"),
        (ACCELERATE, 2, "is 2, and the launcher started 1 (by accelerate launch, ACCELERATE_DYNAMO_MODE)"),
    ],
)
def test_another_number_than_the_launchers_is_refused(
    environ: dict[str, str], gpus: int, words: str, loaded: Loaded
) -> None:
    with pytest.raises(ConfigError) as caught:
        found(environ).reconciled(written(loaded, gpus))
    assert words in str(caught.value)
    assert Launch().reconciled(written(loaded, gpus)).config.parallel.gpus == gpus


def test_what_one_process_runs_is_refused_in_several() -> None:
    Launch(source="WORLD_SIZE").require_one("sample")
    with pytest.raises(ConfigError, match="the launcher started 2 processes, and one runs `trainer sample`"):
        found(TORCHRUN).require_one("sample")
