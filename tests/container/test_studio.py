"""The studio's services of compose: pages through the published port, and runs of the queue beside it."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.container.boxes import Box
from tests.container.conftest import SOMEBODY
from tests.container.quickstart import steps_saved, words
from tests.container.test_compose import STEPS, Project, project
from trainer.errors import ExitCode

__all__ = ["project"]
pytestmark = [pytest.mark.container, pytest.mark.timeout(1500)]

UI = ("--profile", "ui")
NAME = "from-the-queue"


@pytest.fixture
def port() -> int:
    """A port of the loopback address that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def studio(project: Project, port: int) -> Iterator[Project]:
    """The project with its studio started, and nothing else that it does not need."""
    project.variables["UI_PORT"] = str(port)
    up(project)
    yield project
    project.run(*UI, "down", "-v", "--timeout", "0")


def up(project: Project) -> None:
    answer = project.run(*UI, "up", "-d", "studio")
    assert answer.returncode == 0, answer.stdout
    assert project.run("ps", "-aq", "trainer").stdout.strip() == "", "no run was asked for"


def box(project: Project, service: str) -> Box:
    return Box(engine=project.engine, name=project.run(*UI, "ps", "-aq", service).stdout.strip())


def queue(project: Project, *arguments: str) -> str:
    """Output of `trainer queue` in the service that starts its jobs."""
    answer = project.run(*UI, "exec", "-T", "queue", "trainer", "queue", *arguments)
    assert answer.returncode == 0, answer.stdout
    return answer.stdout


def link(project: Project) -> str:
    """The token that the first start printed."""
    log = box(project, "studio")
    found = log.wait_for(lambda: re.search(r"^studio: (http://\S+)/login#token=(\S+)$", log.log(), re.M))
    assert found is not None and found[1] == f"http://127.0.0.1:{project.variables['UI_PORT']}"
    return found[2]


@pytest.fixture
def browser(port: int) -> Iterator[httpx.Client]:
    """A browser without a session."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
        yield client


def test_pages_are_for_those_who_have_the_token(studio: Project, browser: httpx.Client) -> None:
    service = box(studio, "studio")
    token = link(studio)
    service.wait_for(lambda: service.health() == "healthy")
    assert browser.get("/").status_code == 401
    assert browser.get("/", headers={"Host": "evil.example"}).status_code == 400
    origin = {"Origin": str(browser.base_url).rstrip("/")}
    assert browser.post("/login", data={"token": "wrong"}, headers=origin).status_code == 401
    assert browser.post("/login", data={"token": token}, headers=origin).status_code == 303
    page = browser.get("/")
    assert page.status_code == 200 and token not in page.text
    browser.cookies.clear()
    assert browser.get("/").status_code == 401
    # nobody else on the machine may read it
    kept = studio.folder / "output" / ".studio" / "token"
    assert kept.read_text().strip() == token
    assert (kept.stat().st_uid, kept.stat().st_mode & 0o777) == (SOMEBODY, 0o600)


def test_it_can_do_no_more_than_the_file_says(studio: Project) -> None:
    for service in ("studio", "queue"):
        found = box(studio, service).inspect()
        host = found["HostConfig"]
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["Privileged"]
        assert found["Config"]["User"] == f"{SOMEBODY}:0"
        assert not [mount for mount in found["Mounts"] if "docker" in mount["Source"]]
        published = [where for port in (host["PortBindings"] or {}).values() for where in port]
        assert [where["HostIp"] for where in published] == ["127.0.0.1"] * (service == "studio")
    written = studio.run(*UI, "exec", "-T", "studio", "touch", "/opt/trainer/x")
    assert written.returncode != 0 and "Read-only file system" in written.stdout


def test_a_run_of_the_queue_is_saved_at_a_stop_and_goes_on(studio: Project, browser: httpx.Client) -> None:
    output = studio.folder / "output"
    token = link(studio)
    _, *arguments = words(STEPS, "checkpoint.checkpointing_steps=1000")
    said = queue(studio, "add", *arguments, "--on", "cpu", "--output", "/output/quickstart", "--name", NAME)
    assert said.startswith("job 1: ")
    service = box(studio, "queue")
    service.wait_for(lambda: re.search(rf"{NAME} .*running +cpu +[1-9]", queue(studio, "list")))
    origin = {"Origin": str(browser.base_url).rstrip("/")}
    browser.post("/login", data={"token": token}, headers=origin)
    assert "quickstart" in browser.get("/").text
    # runs outlive the studio, and are not lost with the queue
    assert studio.run(*UI, "restart", "studio").returncode == 0
    assert "running" in queue(studio, "list")
    assert studio.run(*UI, "stop").returncode == 0
    assert service.exit_code() == ExitCode.OK, service.log()
    (saved,) = steps_saved(output)
    up(studio)
    service.wait_for(lambda: f"resumed from {saved}" in queue(studio, "log", "1", "--lines", "1000"))
    service.wait_for(lambda: "finished" in queue(studio, "list"))
    assert list((output / "quickstart" / "lora").glob("*.safetensors"))
    log = box(studio, "studio").log()
    assert log.count("#token=") == 1, "it is printed once"
    # the session of before is one of now
    assert browser.get("/").status_code == 200
