"""Hosts that were started otherwise than each other: told on all of them, before anything loads."""

from __future__ import annotations

import shutil
import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.contract.runs import LORA_CASES, Workshop
from tests.e2e.conftest import Process, Start
from tests.e2e.hosts import start_hosts
from tests.ports import free_port
from trainer.errors import ExitCode

FIRST = LORA_CASES[0]
SIX = ("train.train_batch_size=1", "train.gradient_accumulation_steps=6")
"""Steps that two and three hosts share."""
pytestmark = pytest.mark.slow


def refused(processes: list[Process], code: ExitCode, *words: str) -> list[str]:
    """Texts of the hosts, all of which ended with the code and said the words."""
    told = []
    for process in processes:
        found, errors = process.end()
        assert found == code, errors
        assert "Traceback" not in errors
        for one in words:
            assert one in errors, (one, errors)
        status = process.status()
        assert status is None or status.exit_code in (code, None)
        told.append(errors)
    return told


def test_another_learning_rate_and_other_code_on_one_host(fork_ranks: Start, tmp_path: Path) -> None:
    own = {1: ("train.learning_rate=2e-3",)}
    both = start_hosts(fork_ranks, FIRST, tmp_path, own=own, knobs={1: {"patch": "code"}})
    first, second = refused(both, ExitCode.BAD_CONFIG, "train.learning_rate is ", "the trainer is ")
    assert "train.learning_rate is 0.002 on host 1, and 0.001 here" in first
    assert "train.learning_rate is 0.001 on host 0, and 0.002 here" in second
    assert not (both[0].run_dir / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("variables", "overrides", "words"),
    [
        ({1: {"TRAINER_NODES": "3"}}, {}, "the number of hosts (TRAINER_NODES) is "),
        ({}, {1: ("parallel.gpus=4",)}, "the number of processes on each host is "),
    ],
    ids=["hosts", "processes"],
)
def test_another_world_on_one_host(
    variables: Mapping[int, Mapping[str, str]],
    overrides: Mapping[int, tuple[str, ...]],
    words: str,
    fork_ranks: Start,
    tmp_path: Path,
) -> None:
    shared = ("train.train_batch_size=1", "train.gradient_accumulation_steps=12")
    both = start_hosts(fork_ranks, FIRST, tmp_path, *shared, variables=variables, own=overrides)
    refused(both, ExitCode.BAD_CONFIG, words)


def test_other_samples_on_one_host(fork_ranks: Start, yard: Workshop, tmp_path: Path) -> None:
    other = Path(shutil.copytree(yard.samples, tmp_path / "samples"))
    caption = sorted(other.rglob("*.txt"))[0]
    caption.write_text("something else")
    own = {1: (f"data.sets=[{{img_dir: {caption.parent}}}]",)}
    both = start_hosts(fork_ranks, FIRST, tmp_path / "a", own=own)
    refused(both, ExitCode.BAD_DATA, f"{caption.stem}.png is another file, or has another caption, on host 1")
    caption.unlink()
    both = start_hosts(fork_ranks, FIRST, tmp_path / "b", own=own)
    refused(both[1:], ExitCode.BAD_DATA, "the image has no caption")
    refused(both[:1], ExitCode.PEER_LOST, "host 1 could not start: the image has no caption (exit code 65)")


@pytest.mark.parametrize("host", [0, 1])
def test_a_key_that_is_not_there_on_one_host(host: int, fork_ranks: Start, tmp_path: Path) -> None:
    """Told before that host has planned anything, whether it is where all meet or not."""
    both = start_hosts(fork_ranks, FIRST, tmp_path, own={host: ("lora.rnk=4",)})
    refused([both[host]], ExitCode.BAD_CONFIG, "unknown key `lora.rnk`", ": told\n")
    what = f"host {host} could not start: unknown key `lora.rnk` (exit code 78)"
    refused([both[1 - host]], ExitCode.PEER_LOST, what)


def test_one_number_twice_and_an_address_of_another_machine(fork_ranks: Start, tmp_path: Path) -> None:
    """The second host 1 is refused while the first one waits; a host 0 elsewhere before it plans."""
    port = free_port()
    first = start_hosts(fork_ranks, FIRST, tmp_path / "a", *SIX, count=3, only=[0, 1], port=port)
    first[1].wait_until(lambda: (found := first[1].status()) is not None and found.waits)
    (twice,) = start_hosts(fork_ranks, FIRST, tmp_path / "b", *SIX, count=3, only=[1], port=port)
    refused([twice], ExitCode.BAD_CONFIG, "another machine or start says that it is host 1 too")
    for process in first:
        process.popen.send_signal(signal.SIGTERM)
    for process in first:
        code, errors = process.end()
        assert code == ExitCode.STOPPED, errors
    place = {0: {"TRAINER_MASTER": "203.0.113.7:29400"}}
    (elsewhere,) = start_hosts(fork_ranks, FIRST, tmp_path / "c", only=[0], variables=place)
    refused([elsewhere], ExitCode.BAD_CONFIG, "203.0.113.7 is no address of this machine")


def test_a_port_that_is_taken_a_service_of_others_and_hosts_that_do_not_come(
    fork_ranks: Start, tmp_path: Path
) -> None:
    """The port of host 0 is another program's and no trainer to the others; who is missing has a name."""
    short = {"patch": "impatient"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=_greet, args=(server,), daemon=True).start()
        both = start_hosts(fork_ranks, FIRST, tmp_path / "a", port=port)
        code, errors = both[0].end()
        assert code == ExitCode.BAD_CONFIG, errors
        assert f"the hosts cannot meet at port {port} of this one" in errors
        code, errors = both[1].end()
        assert code == ExitCode.BAD_CONFIG, errors
        assert "is no trainer that waits for others" in errors
    alone = start_hosts(fork_ranks, FIRST, tmp_path / "b", *SIX, count=3, only=[0], knobs={0: short})
    other = start_hosts(fork_ranks, FIRST, tmp_path / "c", only=[1], knobs={1: short})
    (text,) = refused(alone, ExitCode.PEER_LOST, "host 1 and host 2 have not come within 7 s")
    assert "waiting at 127.0.0.1:" in text and "for host 1 and host 2" in text
    (text,) = refused(other, ExitCode.PEER_LOST, "host 0 has not come within 7 s", "Connection refused")
    assert "rank 1: waiting at 127.0.0.1:" in text


def _greet(server: socket.socket) -> None:
    """Answer as a program of another kind does."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        connection.close()
