"""The launcher of Slurm: texts of real clients, texts of none, and clients that are missing or refuse.

squeue-22.05*.txt is what Slurm 22.05.8 (Debian 12) printed; tests/slurm asks a real one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.house.sources import ROOT
from tests.unit.queue.clusters.fakes import client, request, words
from trainer.errors import ConfigError, ExitCode, StorageError
from trainer.queue.clusters import known, records
from trainer.queue.clusters.client import asked
from trainer.queue.clusters.slurm import SCRIPT, Slurm, judged, states
from trainer.queue.launcher import CPU, State

HERE = Path(__file__).parent
PEER_LOST = 76


def test_a_real_squeue_is_understood() -> None:
    found = states((HERE / "squeue-22.05.txt").read_text())
    told = {job: (seen.state, seen.exit_code) for job, seen in found.items()}
    assert told == {
        "12": (State.FAILED, None),
        "2": (State.FINISHED, 0),
        "3": (State.FAILED, 70),
        "4": (State.FAILED, 137),
        **dict.fromkeys(("6", "7", "9", "10", "11"), (State.WAITING, None)),
        "8": (State.HELD, None),
        "1": (State.RUNNING, None),
        "5": (State.RUNNING, None),
    }
    assert {found[job].words for job in ("6", "7", "9", "10", "11")} == {
        f"Slurm: {reason}"
        for reason in ("Resources", "Priority", "BeginTime", "PartitionNodeLimit", "Dependency")
    }
    assert "the loss or a gradient became NaN" in found["3"].words
    assert found["12"].words.startswith("cancelled")
    # it was held while it ran
    assert found["5"].words == "is held when it ends before it is finished" and not found["1"].words


def test_a_real_squeue_is_understood_later() -> None:
    found = states((HERE / "squeue-22.05-later.txt").read_text())
    assert (found["1"].state, found["5"].state) == (State.FAILED, State.HELD)
    assert "time limit" in found["1"].words and "held state" in found["5"].words


@given(st.text())
def test_any_text_gives_states_and_no_traceback(text: str) -> None:
    for seen in states(text).values():
        assert isinstance(seen.state, State)


@given(st.lists(st.tuples(st.text("0123456789"), st.text(), st.text(), st.text())))
def test_any_rows_give_states_and_no_traceback(rows: list[tuple[str, ...]]) -> None:
    states("\n".join("|".join(row) for row in rows))


@given(st.sampled_from(["FAILED", "PENDING", "RUNNING"]) | st.text(), st.text(), st.text())
def test_a_state_that_is_not_known_is_shown_with_slurms_words(word: str, status: str, reason: str) -> None:
    seen = judged(word, status, reason)
    if seen.state is State.UNKNOWN:
        assert (word or "no word") in seen.words and reason in seen.words


def test_a_state_of_a_later_slurm_is_unknown() -> None:
    assert judged("EXPEDITING", "0", "None").state is State.UNKNOWN


# ---- the script


def test_the_script_that_people_submit_is_the_launchers() -> None:
    assert (ROOT / "scripts/slurm/train.sbatch").resolve() == SCRIPT


def test_the_script_tries_again_what_a_job_of_kubernetes_counts() -> None:
    """75 by its cause, 76 of the machines that lost another, and a hang; all other codes are final."""
    (cases,) = re.findall(r"^case \$code in\n(.*?)^esac$", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    labels = re.findall(r"^([\d |]+)\)$", cases, re.MULTILINE)
    tried = {int(code) for label in labels for code in label.split("|")}
    assert tried == {ExitCode.HUNG, ExitCode.STOPPED, PEER_LOST}


# ---- clients


def numbers(folder: Path) -> str:
    """sbatch's body: 7, 8 and so on."""
    return f'echo x >>"{folder}/count"; echo $((6 + $(wc -l <"{folder}/count")))'


def test_a_job_is_handed_over_by_words_and_without_settings(
    clients: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER__LORA__RANK", "4")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TRAINER_CACHE_DIR", "cache")
    client(clients, "sbatch", numbers(clients))
    slurm = Slurm(queue=tmp_path / "queue", options=("--partition=gpu",))
    name = "$(touch mark) --wrap=x %j"
    assert slurm.submit([request(tmp_path, name, count=2)]) == ["slurm-7"]
    config = tmp_path / name / "slurm/config.yaml"
    assert config.read_text() == "family: flux1_dev\n"
    *ours, script, last = words(clients, "sbatch")
    assert (script, last) == (str(SCRIPT), str(config))
    output = str(config.with_name("output.log")).replace("%", "%%")
    assert {f"--job-name={name}", f"--chdir={tmp_path}", f"--output={output}", "--gpus=2"} < set(ours)
    # after ours: the last one of two counts
    assert ours[-1] == "--partition=gpu"
    told = dict(
        line.split("=", 1) for line in (clients / "sbatch.env").read_text().splitlines() if "=" in line
    )
    assert "TRAINER__LORA__RANK" not in told and "RANK" not in told
    assert told["TRAINER_CACHE_DIR"] == str(Path.cwd() / "cache")
    assert told["LAUNCH"].endswith(" -m trainer")


def test_a_job_of_the_cpu_asks_for_no_gpu_and_a_held_one_is_held(clients: Path, tmp_path: Path) -> None:
    client(clients, "sbatch", numbers(clients))
    Slurm(queue=tmp_path / "queue").submit([request(tmp_path, gpus=(CPU,), held=True)])
    given = words(clients, "sbatch")
    assert "--hold" in given and not [word for word in given if word.startswith("--gpus")]


def test_a_group_is_taken_whole_or_not_at_all(clients: Path, tmp_path: Path) -> None:
    limit = f'[ "$(wc -l <"{clients}/count")" -lt 2 ] || {{ echo "sbatch: error: QOS limit" >&2; exit 1; }}'
    client(clients, "sbatch", f"{numbers(clients)}; {limit}")
    client(clients, "scancel", "")
    slurm = Slurm(queue=tmp_path / "queue")
    with pytest.raises(ConfigError, match="QOS limit"):
        slurm.submit([request(tmp_path, "one"), request(tmp_path, "two")])
    assert words(clients, "scancel") == ["7"]
    assert not records.kept(tmp_path / "queue")


def test_two_jobs_do_not_write_to_one_folder(clients: Path, tmp_path: Path) -> None:
    client(clients, "sbatch", numbers(clients))
    client(clients, "squeue", "echo '7|PENDING|0|Priority'")
    slurm = Slurm(queue=tmp_path / "queue")
    with pytest.raises(ConfigError, match="two of these jobs write there"):
        slurm.submit([request(tmp_path), request(tmp_path)])
    slurm.submit([request(tmp_path)])
    with pytest.raises(ConfigError, match=r"cats \(slurm-7\) writes there"):
        slurm.submit([request(tmp_path)])


@pytest.mark.parametrize("said", ["", "Submitted batch job 7", "a\x1b[2J"])
def test_what_is_no_number_is_no_job(clients: Path, tmp_path: Path, said: str) -> None:
    client(clients, "sbatch", f"printf '%s\\n' '{said}'")
    with pytest.raises(ConfigError, match="not the number of a job"):
        Slurm(queue=tmp_path / "queue").submit([request(tmp_path)])


def test_a_number_with_its_clusters_name_is_a_job(clients: Path, tmp_path: Path) -> None:
    """sbatch --parsable of several clusters."""
    client(clients, "sbatch", "echo '7;north'")
    assert Slurm(queue=tmp_path / "queue").submit([request(tmp_path)]) == ["slurm-7"]


def test_a_missing_client_is_told_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch: it is not installed here"):
        Slurm(queue=tmp_path / "queue").submit([request(tmp_path)])
    kept = records.Submitted(launcher="slurm", job="7", name="cats", group="", run="/runs/cats")
    records.keep(tmp_path / "queue", kept)
    ((_, seen),) = known.overview(tmp_path / "queue")
    assert seen.state is State.UNKNOWN and "squeue: it is not installed here" in seen.words


def test_what_a_client_says_gives_no_orders_to_the_terminal(clients: Path) -> None:
    client(clients, "squeue", r"printf 'no \033[2J way\n more' >&2; exit 3")
    with pytest.raises(ConfigError) as caught:
        asked(("squeue", "--me"))
    assert str(caught.value).startswith("squeue --me: no \\x1b[2J way more")


@pytest.mark.parametrize(
    ("code", "state", "words_"),
    [(0, State.FINISHED, ""), (70, State.FAILED, "exit code 70"), (None, State.LOST, "left no exit code")],
)
def test_a_job_that_slurm_has_forgotten_is_judged_by_its_run(
    clients: Path, tmp_path: Path, code: int | None, state: State, words_: str
) -> None:
    client(clients, "sbatch", numbers(clients))
    client(clients, "squeue", "")
    slurm = Slurm(queue=tmp_path / "queue")
    (name,) = slurm.submit([request(tmp_path)])
    process = {"supervisor": 1, "runtime_dir": "", "started_unix_seconds": 1.0, "boot": "", "processes": ""}
    ended = {"ended_unix_seconds": 2.0, "exit_code": code}
    (tmp_path / "cats/process.json").write_text(json.dumps(process | ended))
    seen = slurm.state(name.removeprefix("slurm-"))
    assert (seen.state, seen.exit_code) == (state, code) and words_ in seen.words
    slurm.forget("7")
    assert not records.kept(tmp_path / "queue")


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: json.dumps({"job": text}).encode()))
def test_a_damaged_record_is_told(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    queue = tmp_path_factory.mktemp("queue")
    (queue / "clusters").mkdir()
    (queue / "clusters/slurm-7.json").write_bytes(content)
    with pytest.raises(StorageError, match="it was damaged"):
        records.kept(queue)
