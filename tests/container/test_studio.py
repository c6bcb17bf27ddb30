"""The studio's services of compose: pages through the published port, and runs of the queue beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx2 as httpx
import pytest

from tests.container.boxes import Box
from tests.container.conftest import SOMEBODY
from tests.container.quickstart import steps_saved, words
from tests.container.test_compose import Project, project
from tests.ports import free_port
from trainer.errors import ExitCode

__all__ = ["project"]
pytestmark = [pytest.mark.container, pytest.mark.timeout(1500)]

UI = ("--profile", "ui")
MANY_STEPS = 20000


@pytest.fixture
def port() -> int:
    """A port of the loopback address that is free now."""
    return free_port()


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


def add(project: Project, name: str, steps: int) -> str:
    _, *arguments = words(steps, "checkpoint.checkpointing_steps=10000")
    return queue(project, "add", *arguments, "--on", "cpu", "--output", f"/output/{name}", "--name", name)


def state(project: Project, name: str) -> str:
    """A job's line in the list, from its state on."""
    (line,) = [line for line in queue(project, "list").splitlines() if f" {name} " in line]
    return line.partition(f" {name} ")[2].strip()


def test_runs_of_the_queue_save_at_a_stop_and_go_on(studio: Project, browser: httpx.Client) -> None:
    output, token = studio.folder / "output", link(studio)
    service = box(studio, "queue")
    assert add(studio, "short", 4).startswith("job 1: ")
    # more steps than even a fast machine gets through while compose starts and stops services
    assert add(studio, "long", MANY_STEPS).startswith("job 2: ")
    service.wait_for(lambda: re.match(r"running\b.* [1-9]\d*/", state(studio, "long")))
    assert state(studio, "short").startswith("finished")
    assert {path.stat().st_uid for path in (output / "short" / "lora").glob("*.safetensors")} == {SOMEBODY}
    assert "Proved: reloaded from disk" in queue(studio, "log", "1")
    origin = {"Origin": str(browser.base_url).rstrip("/")}
    browser.post("/login", data={"token": token}, headers=origin)
    assert "long" in browser.get("/").text
    # runs outlive the studio
    assert studio.run(*UI, "restart", "studio").returncode == 0
    assert state(studio, "long").startswith("running")
    # and go on after their container
    assert studio.run(*UI, "stop").returncode == 0
    assert service.exit_code() == ExitCode.OK, service.log()
    (saved,) = steps_saved(output, "long")
    up(studio)
    service.wait_for(lambda: f"resumed from {saved}" in queue(studio, "log", "2", "--lines", "1000"))
    service.wait_for(lambda: state(studio, "long").startswith("running"))
    log = box(studio, "studio")
    log.wait_for(lambda: "the token is in /output/.studio/token" in log.log())
    assert log.log().count("#token=") == 1, "it is printed once"
    log.wait_for(lambda: log.health() == "healthy")
    assert browser.get("/").status_code == 200, "the session of before is one of now"
