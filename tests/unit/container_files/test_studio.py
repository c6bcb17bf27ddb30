"""The studio and its queue as services of compose: what they may do, and what their checks say."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.container_files.compose_files import COMPOSE, Node, config, interpolated, load, services
from tests.unit.container_files.test_compose import (
    HELPER,
    MACHINE_ID,
    STUDIO,
    assert_confined,
    seconds,
)
from tests.unit.container_files.test_manuals import click_command
from tests.unit.house.sources import ROOT
from trainer.cli.ui import DEFAULT_PORT, STATE_FOLDER
from trainer.container import appliance
from trainer.container.appliance import TARGETS
from trainer.machine.profiles import PROFILES
from trainer.queue import database

PATIENCE_SECONDS = 60


@pytest.fixture(params=TARGETS)
def profile(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_nothing_of_it_is_there_without_its_profile(profile: str) -> None:
    found = services(profile)
    assert {name for name, service in found.items() if service.get("profiles") == ["ui"]} == set(STUDIO)
    assert not any("profiles" in found[name] for name in ("trainer", HELPER))
    text = (COMPOSE / f"{profile}.yaml").read_text()
    assert f"docker compose -f compose/{profile}.yaml --profile ui up studio\n" in text


def test_the_studio_is_published_on_the_loopback_address_and_the_queue_nowhere(profile: str) -> None:
    found = services(profile)
    for variables, port in (({}, DEFAULT_PORT), ({"UI_PORT": "8080"}, 8080)):
        (published,) = found["studio"]["ports"]
        assert interpolated(published, variables) == f"127.0.0.1:{port}:{port}"
        command, given = click_command(interpolated(found["studio"]["command"], variables).split())
        options = command.make_context("ui", list(given)).params
        # the link that it prints names the port inside
        assert (options["host"], options["port"]) == ("0.0.0.0", port)
        assert options["published"] == interpolated(published, variables).partition(":")[0]
        assert str(port) == interpolated(found["studio"]["healthcheck"]["test"][-1], variables)
        roots = {volume.path for volume in appliance.VOLUMES}
        assert {str(options[root]) for root in ("runs", "data", "models")} < roots
        assert options["folder"] is None, "token and sessions lie below the runs, on a volume"
    assert "ports" not in found["queue"] and "expose" not in found["studio"]
    assert "EXPOSE 9464\n" in (ROOT / "docker/Dockerfile").read_text(), "docker run -P would publish it"


def test_both_are_the_image_with_the_gpus_and_variables_of_a_run(profile: str) -> None:
    found = services(profile)
    for name in STUDIO:
        for key in ("image", "build", "user", "env_file"):
            assert found[name][key] == found["trainer"][key]
        assert ("deploy" in found[name]) == (PROFILES[profile].device == "cuda")
        assert found[name].get("deploy") == found["trainer"].get("deploy")
        assert found[name]["depends_on"][HELPER] == {"condition": "service_completed_successfully"}
    trainers = dict(found["trainer"]["environment"])
    kept = {"HF_TOKEN_PATH": found["studio"]["environment"]["HF_TOKEN_PATH"]}
    assert found["queue"]["environment"] == trainers | kept
    assert found["queue"]["secrets"] == found["trainer"]["secrets"]
    # it asks no other address, so it needs no key to one; the queue's runs tell of their end
    handed_in = [name for name in appliance.SECRET_FILES if name != "TRAINER_WEBHOOK_FILE"]
    assert found["studio"]["environment"] == kept | {
        name: value for name, value in trainers.items() if name not in handed_in
    }
    assert "secrets" not in found["studio"]


def test_a_token_that_the_studio_keeps_is_where_the_queues_runs_read_it(profile: str) -> None:
    """On a volume that both write, in the studio's own folder; a webhook it cannot keep for them."""
    found = services(profile)
    token, webhook = (
        Path(found["studio"]["environment"][name]) for name in ("HF_TOKEN_PATH", "TRAINER_WEBHOOK_FILE")
    )
    command, given = click_command(interpolated(found["studio"]["command"], {}).split())
    runs = command.make_context("ui", list(given)).params["runs"]
    assert token.parent == runs / STATE_FOLDER
    (mount,) = [one for one in found["studio"]["volumes"] if one["target"] == str(runs)]
    assert not mount.get("read_only", False)
    assert not [one for one in found["studio"]["volumes"] if webhook.is_relative_to(one["target"])]
    assert not [one for one in found["studio"]["tmpfs"] if webhook.is_relative_to(one.partition(":")[0])]


def test_they_may_do_no_more_than_they_must(profile: str) -> None:
    found = services(profile)
    for name in STUDIO:
        service = found[name]
        assert_confined(service)
        assert service["read_only"] is True
        assert "cap_add" not in service and "network_mode" not in service
        assert not [mount for mount in service["volumes"] if "docker.sock" in str(mount)]
        mounts = dict(mount.split(":", 1) for mount in service["tmpfs"])
        assert set(mounts) == {"/tmp", appliance.RUNTIME_DIR}
        assert all("mode=1777" in options and "size=" in options for options in mounts.values())
        # compilers of runs load from /tmp what they built there
        assert ("exec" in mounts["/tmp"].split(",")) == (name == "queue")


def test_the_queue_knows_its_machine_by_the_hosts_file(profile: str) -> None:
    assert Path(MACHINE_ID) == database._MACHINE_ID
    for name in STUDIO:
        (mount,) = [one for one in services(profile)[name]["volumes"] if one["target"] == MACHINE_ID]
        assert (mount["type"], mount["read_only"]) == ("bind", True)
        assert interpolated(mount["source"], {}) == MACHINE_ID
        other = {"MACHINE_ID": "./machine-id"}  # a host without one: `up` would fail
        assert interpolated(mount["source"], other) == other["MACHINE_ID"]
        assert mount["bind"] == {"create_host_path": False}, "Docker would make a folder of that name"


def test_studio_queue_and_runs_have_one_queue(profile: str) -> None:
    folder = appliance.IMAGE_ENVIRONMENT["TRAINER_QUEUE_DIR"]
    assert folder.startswith("/output/"), "on the volume that all three have"
    for name in ("trainer", *STUDIO):
        service = services(profile)[name]
        (output,) = [mount for mount in service["volumes"] if mount["target"] == "/output"]
        assert not output.get("read_only", False)
        assert "TRAINER_QUEUE_DIR" not in service["environment"], "the image says where it is"
    assert "TRAINER_QUEUE_DIR" not in (COMPOSE / "variables.env").read_text().split()


def test_runs_of_the_queue_may_save_and_come_back_after_a_restart(profile: str) -> None:
    found = services(profile)
    command, given = click_command(found["queue"]["command"].split())
    assert command.name == "run" and command.make_context("run", list(given)).params["stop_runs"] is True
    assert seconds(found["queue"]["stop_grace_period"]) == appliance.GRACE_SECONDS
    for key in ("oom_score_adj", "pids_limit", "shm_size", "ipc"):
        assert found["queue"][key] == found["trainer"][key]
    assert {found[name]["restart"] for name in STUDIO} == {"unless-stopped"}


def test_compose_starts_them_only_when_it_is_told(profile: str, tmp_path: Path) -> None:
    files = ["-f", str(COMPOSE / f"{profile}.yaml")]
    assert set(config(files, tmp_path)["services"]) == {"trainer", HELPER}
    found = config([*files, "--profile", "ui"], tmp_path, UI_PORT="8080", UID="1000")["services"]
    assert set(found) == {"trainer", HELPER, *STUDIO}
    (port,) = found["studio"]["ports"]
    assert (port["host_ip"], port["target"], port["published"]) == ("127.0.0.1", 8080, "8080")
    for name in STUDIO:
        assert found[name]["user"] == "1000:0"
        assert found[name]["build"]["target"] == profile
        sources = {mount["target"]: mount["source"] for mount in found[name]["volumes"]}
        assert sources.pop(MACHINE_ID) == MACHINE_ID
        assert sources == {mount["target"]: mount["source"] for mount in found["trainer"]["volumes"]}


# ---- the checks of health, for real


def checked(service: Node, port: int = 0, **variables: str) -> int:
    """Exit code of a service's check of health, run as its container runs it."""
    kind, program, *words = service["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "python")
    words = [interpolated(word, {"UI_PORT": str(port)}).replace("$$", "$") for word in words]
    kept = {name: text for name, text in os.environ.items() if name != "TRAINER_QUEUE_DIR"}
    # a proxy that leads nowhere must not be asked
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY"), "http://127.0.0.1:9")
    return subprocess.run(
        [sys.executable, *words], env=kept | proxies | variables, cwd=ROOT, capture_output=True
    ).returncode


@pytest.fixture
def studio(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A studio as its service starts it, on a free port of this machine alone, and the port."""
    command = interpolated(load("base.yaml")["services"]["studio"]["command"], {"UI_PORT": "0"})
    for volume in appliance.VOLUMES:
        command = command.replace(f" {volume.path}", f" {tmp_path / volume.name}")
        (tmp_path / volume.name).mkdir()
    words = command.replace("0.0.0.0", "127.0.0.1").split()
    with subprocess.Popen(
        [sys.executable, "-m", "trainer", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        found = re.search(r"^studio: http://127\.0\.0\.1:(\d+)/login#token=\S+$", process.stdout.readline())
        assert found is not None
        yield process, int(found[1])
        process.kill()


def test_a_studio_that_answers_is_healthy_and_one_that_does_not_is_not(
    studio: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = studio
    service = load("base.yaml")["services"]["studio"]
    end = time.monotonic() + PATIENCE_SECONDS
    while checked(service, port) != 0:
        assert process.poll() is None and time.monotonic() < end
    process.send_signal(signal.SIGSTOP)  # it lives and its port takes connections: it hangs
    assert checked(service, port) != 0
    process.kill()
    process.wait()
    assert checked(service, port) != 0


def test_a_queue_is_healthy_while_something_starts_its_jobs(tmp_path: Path) -> None:
    service = load("base.yaml")["services"]["queue"]
    variables = {"TRAINER_QUEUE_DIR": str(tmp_path / "queue")}
    assert checked(service, **variables) == 1
    command = [sys.executable, "-m", "trainer", *service["command"].split()]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}) as process:
        end = time.monotonic() + PATIENCE_SECONDS
        while checked(service, **variables) != 0:
            assert process.poll() is None and time.monotonic() < end
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0
    assert checked(service, **variables) == 1
