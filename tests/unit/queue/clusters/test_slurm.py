"""The launcher of Slurm: texts of real clients, texts of none, and clients that are missing or refuse.

squeue-22.05*.txt is what Slurm 22.05.8 (Debian 12) printed; tests/slurm asks a real one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
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


@pytest.fixture
def script(clients: Path, tmp_path: Path) -> Callable[..., str]:
    """The script on one node, with a program that ends with CODE: what it said."""
    client(clients, "srun", 'while [ "$1" != bash ]; do shift; done\nexec "$@"')
    client(clients, "scontrol", "echo node-1")
    client(clients, "scancel", "")
    program = tmp_path / "my envs/trainer"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "words: $*"\nexit "$CODE"\n')
    program.chmod(0o755)

    def run(code: int, log: Path, *, job: str = "7", restarts: int = 0, launch: str = "", **more: str) -> str:
        own = {
            "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "node-1", "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NODEID": "0", "SLURM_RESTART_COUNT": str(restarts), "MAX_RESTARTS": "2",
            "CODE": str(code), "LAUNCH": launch or f"{program}\n-P", "TMPDIR": str(tmp_path), **more,
        }  # fmt: skip
        before = log.stat().st_size if log.is_file() else 0
        with log.open("ab") as output:
            words_ = ["bash", str(SCRIPT), "my.yaml"]
            ended = subprocess.run(
                words_, env={**os.environ, **own}, stdout=output, stderr=output, timeout=60
            )
        assert ended.returncode == code
        return log.read_text()[before:] if log.is_file() else ""

    return run


def test_a_run_has_all_cpus_of_its_job(script: Callable[..., str], clients: Path, tmp_path: Path) -> None:
    """A step has them where it names none, but srun may bind its one task to one core of them."""
    script(0, tmp_path / "job.log", SLURM_CPUS_PER_TASK="16")
    asked = words(clients, "srun")
    before = asked[: asked.index("bash")]
    assert "--cpu-bind=none" in before and not [word for word in before if word.startswith("--cpus-per")]


def test_a_folder_of_the_submitting_machine_need_not_be_there(
    script: Callable[..., str], tmp_path: Path
) -> None:
    program = tmp_path / "says"
    program.write_text('#!/bin/sh\necho "in $(stat -c %n:%a "$TRAINER_RUNTIME_DIR")"\n')
    program.chmod(0o755)
    given = {"launch": str(program), "job": "987654"}
    said = script(0, tmp_path / "one", **given, TMPDIR="/local/job12"), script(0, tmp_path / "two", **given)
    for text, parent in zip(said, (Path("/tmp"), tmp_path), strict=True):
        folder = re.search(rf"in ({parent}/trainer-987654-\w{{8}}):700$", text, re.MULTILINE)
        assert folder, "of a name that nobody can guess, and nobody else's"
        assert not Path(folder[1]).exists()


def test_the_script_keeps_the_code_of_a_step_that_ends_while_it_heeds_the_time_limit(
    script: Callable[..., str], clients: Path, tmp_path: Path
) -> None:
    client(clients, "srun", "sleep 0.5\nkill -USR1 $PPID\nsleep 0.2\nexit $CODE")
    client(clients, "scancel", "sleep 1")
    assert "exit code 75: held: its time limit is no longer" in script(75, tmp_path / "job.log")


def test_the_script_counts_hangs_and_lost_machines_in_a_row(
    script: Callable[..., str], clients: Path, tmp_path: Path
) -> None:
    """Slurm's number counts every start, also those after a time limit or a preemption."""
    log = tmp_path / "output.log"
    again = "goes on from the newest checkpoint"
    assert again in script(ExitCode.HUNG, log, restarts=30)
    assert again in script(PEER_LOST, log, restarts=31)
    assert "stopped and held" in script(ExitCode.STOPPED, log, restarts=32)
    assert again in script(PEER_LOST, log, restarts=33)
    assert again in script(ExitCode.HUNG, log, restarts=34)
    assert again not in script(PEER_LOST, log, restarts=35)
    # it is tried anew by a person, and a job that is added again begins anew
    assert again in script(PEER_LOST, log, restarts=36)
    assert again in script(PEER_LOST, log, restarts=37)
    assert again in script(PEER_LOST, log, job="8")
    assert "words:" in script(ExitCode.OK, log)
    assert sorted(path.name for path in tmp_path.glob("output.log*")) == ["output.log"]
    assert words(clients, "scontrol").count("requeue") == 7


def test_where_the_log_is_no_file_the_scripts_starts_are_counted_by_slurm(
    script: Callable[..., str], clients: Path
) -> None:
    script(PEER_LOST, Path("/dev/null"), restarts=1)
    assert words(clients, "scontrol").count("requeue") == 1
    script(PEER_LOST, Path("/dev/null"), restarts=2)
    assert words(clients, "scontrol").count("requeue") == 1


def test_the_scripts_program_has_words_by_lines_or_by_spaces(
    script: Callable[..., str], tmp_path: Path
) -> None:
    """A virtual environment's path may have a blank."""
    log = tmp_path / "output.log"
    assert "words: -P train my.yaml" in script(0, log)
    assert "words: a b train my.yaml" in script(0, log, launch="echo words: a b")


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
    assert {f"--job-name={name}", f"--chdir={tmp_path}", f"--output={output}", "--nodes=1", "--gpus=2"} < set(
        ours
    )
    # after ours: the last one of two counts
    assert ours[-1] == "--partition=gpu"
    told = dict(
        line.split("=", 1) for line in (clients / "sbatch.env").read_text().splitlines() if "=" in line
    )
    assert "TRAINER__LORA__RANK" not in told and "RANK" not in told
    assert told["TRAINER_CACHE_DIR"] == str(Path.cwd() / "cache")
    assert told["LAUNCH"] == sys.executable
    assert "\n-P\n-m\ntrainer\n" in (clients / "sbatch.env").read_text()


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        (["--nodes=2"], False),
        (["-N2"], False),
        (["-w", "node[1-2]"], False),
        (["--nodelist=node[1-2]"], False),
        (["-F", "nodes.txt"], False),
        (["--ntasks", "2"], False),
        (["--nice=10", "--ntasks-per-core=1"], True),
        (["--no-requeue"], True),
    ],
)
def test_gpus_are_those_of_one_node_unless_the_user_names_nodes(
    clients: Path, tmp_path: Path, options: list[str], ours: bool
) -> None:
    """Without it Slurm takes free GPUs wherever they are."""
    client(clients, "sbatch", numbers(clients))
    Slurm(queue=tmp_path / "queue", options=options).submit([request(tmp_path, count=4)])
    own = words(clients, "sbatch")[: -len(options) - 2]
    assert "--gpus=4" in own and ("--nodes=1" in own) is ours


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        (["--gres=gpu:2"], False),
        (["--gres", "gpu:h100:2"], False),
        (["--gres=shard:4"], False),
        (["--gpus=2"], False),
        (["--gpus-per-task", "2"], False),
        (["-G2"], False),
        (["--partition=gpu", "--tres-per-node=gres/gpu:2"], False),
        (["--partition=gpu"], True),
        (["--gpu-bind=none", "--gres-flags=enforce-binding"], True),
        (["--gres=tmpfs:100G"], True),
    ],
)
@pytest.mark.parametrize("count", [1, 2])
def test_gpus_that_the_user_names_are_the_jobs(
    clients: Path, tmp_path: Path, options: list[str], ours: bool, count: int
) -> None:
    """Slurm joins --gpus-per-node=1 with another option for GPUs, and the job gets one."""
    client(clients, "sbatch", numbers(clients))
    Slurm(queue=tmp_path / "queue", options=options).submit([request(tmp_path, count=count)])
    own = words(clients, "sbatch")[: -len(options) - 2]
    assert bool({"--gpus=2", "--gpus-per-node=1"} & set(own)) is ours


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("SBATCH_GRES", "gpu:a100:2", False),
        ("SBATCH_GPUS", "2", False),
        ("SBATCH_GPUS_PER_NODE", "2", False),
        ("SBATCH_GPUS_PER_TASK", "2", False),
        ("SBATCH_GRES", "tmpfs:100G", True),
        ("SBATCH_GRES_FLAGS", "enforce-binding", True),
        ("SBATCH_GPU_BIND", "none", True),
        ("SBATCH_GPUS", "", True),
        ("SBATCH_PARTITION", "gpu", True),
    ],
)
def test_gpus_of_sbatchs_own_variables_are_the_jobs(
    clients: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, ours: bool
) -> None:
    """A site's or a user's profile names them once for all jobs: sbatch reads these, and joins ours."""
    monkeypatch.setenv(name, value)
    client(clients, "sbatch", numbers(clients))
    Slurm(queue=tmp_path / "queue").submit([request(tmp_path)])
    assert ("--gpus-per-node=1" in words(clients, "sbatch")) is ours
    assert f"{name}={value}" in (clients / "sbatch.env").read_text().splitlines()


@pytest.mark.parametrize(
    ("steps", "began"),
    [("", False), ("7.batch", False), ("7.extern 7.batch", False), ("7.0 7.batch", True)],
)
def test_a_job_whose_nodes_get_ready_is_stopped(
    clients: Path, tmp_path: Path, steps: str, began: bool
) -> None:
    """A signal to its steps would be lost where there is none yet."""
    client(clients, "sbatch", numbers(clients))
    client(
        clients, "squeue", f"case $1 in --steps) printf '%s\\n' {steps};; *) echo '7|RUNNING|0|None';; esac"
    )
    client(clients, "scontrol", "")
    client(clients, "scancel", "")
    slurm = Slurm(queue=tmp_path / "queue")
    slurm.submit([request(tmp_path)])
    slurm.stop("7")
    assert words(clients, "squeue")[-4:] == ["--steps", "--jobs=7", "--noheader", "--format=%i"]
    assert words(clients, "scontrol")[:2] == ["hold", "7"]
    assert words(clients, "scancel") == (["--signal=TERM", "7"] if began else [])
    assert words(clients, "scontrol")[2:] == ([] if began else ["requeuehold", "7"])


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


@pytest.mark.parametrize("word", ["FAILED", "COMPLETED", "CANCELLED"])
def test_a_folder_is_free_beside_other_jobs_and_once_its_job_has_ended(
    clients: Path, tmp_path: Path, word: str
) -> None:
    client(clients, "sbatch", numbers(clients))
    client(clients, "squeue", f"echo '7|{word}|0|None'; echo '8|RUNNING|0|None'")
    slurm = Slurm(queue=tmp_path / "queue")
    assert slurm.submit([request(tmp_path, "cats"), request(tmp_path, "dogs")]) == ["slurm-7", "slurm-8"]
    assert [slurm.state(job).state.value for job in ("7", "8")] == [judged(word, "0", "").state, "running"]
    assert slurm.submit([request(tmp_path, "birds")]) == ["slurm-9"]
    assert slurm.submit([request(tmp_path, "cats")]) == ["slurm-10"]


def test_all_own_jobs_are_asked_for_in_the_columns_that_are_read(clients: Path, tmp_path: Path) -> None:
    """The words that gave squeue-22.05.txt: by itself squeue tells of no job that has ended."""
    client(clients, "sbatch", numbers(clients))
    client(clients, "squeue", "echo '7|COMPLETED|0|None'")
    slurm = Slurm(queue=tmp_path / "queue")
    slurm.submit([request(tmp_path)])
    assert slurm.state("7").state is State.FINISHED
    given = ["--me", "--states=all", "--noheader", "--Format=JobID:|,State:|,exit_code:|,Reason:"]
    assert words(clients, "squeue") == given


def test_what_has_ended_is_not_released(clients: Path, tmp_path: Path) -> None:
    client(clients, "sbatch", numbers(clients))
    client(clients, "squeue", "echo '7|FAILED|17920|NonZeroExitCode'")
    client(clients, "scontrol", "")
    slurm = Slurm(queue=tmp_path / "queue")
    slurm.submit([request(tmp_path)])
    with pytest.raises(ConfigError, match="slurm-7: it has ended"):
        slurm.release("7")
    assert not words(clients, "scontrol")
    slurm.hold("7")
    assert words(clients, "scontrol") == ["hold", "7"]
    assert slurm.log("7") == ""


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


@pytest.mark.parametrize("option", ["--clusters=gpu", "-Mgpu", "-M", "variable"])
def test_jobs_of_another_cluster_are_refused(
    clients: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """Their states would be asked of this one, whose job of that number is another."""
    client(clients, "sbatch", f'touch "{tmp_path}/called"; echo "7;gpu"')
    if option == "variable":
        monkeypatch.setenv("SBATCH_CLUSTERS", "gpu")
    options = () if option == "variable" else (option, "gpu")[: 1 + (option == "-M")]
    with pytest.raises(ConfigError, match="another cluster"):
        Slurm(queue=tmp_path / "queue", options=options).submit([request(tmp_path)])
    assert not (tmp_path / "called").exists()


def test_what_a_client_says_gives_no_orders_to_the_terminal(clients: Path) -> None:
    client(clients, "squeue", r"printf 'no \033[2J way\n more' >&2; exit 3")
    with pytest.raises(ConfigError) as caught:
        asked(("squeue", "--me"))
    assert str(caught.value).startswith("squeue --me: no \\x1b[2J way more")


@pytest.mark.parametrize(
    ("code", "state", "words_", "ago"),
    [
        (0, State.FINISHED, "", 0.0),
        (70, State.FAILED, "exit code 70", 0.0),
        (None, State.LOST, "left no exit code", 0.0),
        (0, State.LOST, "left no exit code", 3600.0),  # of an attempt before this job
    ],
)
def test_a_job_that_slurm_has_forgotten_is_judged_by_its_run(
    clients: Path, tmp_path: Path, code: int | None, state: State, words_: str, ago: float
) -> None:
    client(clients, "sbatch", numbers(clients))
    client(clients, "squeue", "")
    slurm = Slurm(queue=tmp_path / "queue")
    (name,) = slurm.submit([request(tmp_path)])
    began = time.time() - ago
    process = {"supervisor": 1, "runtime_dir": "", "started_unix_seconds": began, "boot": "", "processes": ""}
    ended = {"ended_unix_seconds": began + 1, "exit_code": code}
    (tmp_path / "cats/process.json").write_text(json.dumps(process | ended))
    seen = slurm.state(name.removeprefix("slurm-"))
    assert (seen.state, seen.exit_code) == (state, None if ago else code) and words_ in seen.words
    slurm.forget("7")
    assert not records.kept(tmp_path / "queue")


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: json.dumps({"job": text}).encode()))
def test_a_damaged_record_is_told(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    queue = tmp_path_factory.mktemp("queue")
    (queue / "clusters").mkdir()
    (queue / "clusters/slurm-7.json").write_bytes(content)
    with pytest.raises(StorageError, match="it was damaged"):
        records.kept(queue)
