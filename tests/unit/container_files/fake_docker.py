"""A docker that plays containers for tests of scripts/test_container.sh.

Its program is a shell script that asks a server in the tests' process: Python takes longer to start than to
answer. Containers are files in the folder $STATE, every call is a line in its file `calls`, and $FAULT says
what goes wrong.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import socketserver
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

FLAGS = {"--rm", "-d", "--read-only"}
PROGRAM = """#!/bin/bash
exec 3<>/dev/tcp/127.0.0.1/{port}
printf '%s\\0' "$#" "$STATE" "$FAULT" "$@" >&3
IFS= read -r code <&3
IFS= read -r -d '' text <&3
printf '%s' "$text"
exit "$code"
"""


class _Call(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        """Read how many words there are, and them; answer with the exit code and what is printed."""
        asked: list[bytes] = [b""]
        while not asked[0] or len(asked) < int(asked[0]) + 4:
            if not (more := self.request.recv(65536)):
                return  # the program was killed
            asked = (b"\0".join(asked) + more).split(b"\0")
        _, state, fault, *words = (one.decode() for one in asked[:-1])
        printed, code = io.StringIO(), 0
        try:
            with contextlib.redirect_stdout(printed):
                main(words, Path(state), fault)
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception:  # whatever it is, the test is told
            printed.write(traceback.format_exc())
            code = 1
        self.wfile.write(f"{code}\n{printed.getvalue()}".encode())


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The text of a program that asks a server, which answers one call after the other."""
    with socketserver.TCPServer(("127.0.0.1", 0), _Call) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield PROGRAM.format(port=server.server_address[1])
        server.shutdown()


def main(words: list[str], state: Path, fault: str) -> None:
    with (state / "calls").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    commands = {
        "image": image, "run": run, "exec": execute, "inspect": inspect, "stop": stop, "logs": logs, "rm": rm,
    }  # fmt: skip
    commands[words[0]](words, state, fault)


def answer(text: object = "", code: int = 0) -> NoReturn:
    print(text)
    raise SystemExit(code)


def load(container: Path) -> dict[str, Any]:
    return json.loads(container.read_text())


def lay(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def image(words: list[str], state: Path, fault: str) -> None:
    if fault == "image":
        answer("", 1)
    answer({"root": "amd64 ", "architecture": "arm64 10001:0"}.get(fault, "amd64 10001:0"))


def run(words: list[str], state: Path, fault: str) -> None:
    options, index = [], 1
    while words[index].startswith("-"):
        step = 1 if words[index] in FLAGS else 2
        options.append(tuple(words[index : index + step]))
        index += step
    values = dict(pair for pair in options if len(pair) == 2)
    mounts = {pair[1].split(":")[1]: Path(pair[1].split(":")[0]) for pair in options if pair[0] == "-v"}
    command, output, on_gpu = words[index + 1 :], mounts["/output"], "--gpus" in values
    if ("-d",) not in options:
        once(command, output, fault, on_gpu=on_gpu)
    # a long run
    old = list((output / "long").glob("checkpoints/step-*"))
    log = "resumed from step-000040" if old and fault != "resume" else "training"
    made = {"running": fault != "dies", "code": 0, "log": log, "output": str(output)}
    (state / values["--name"]).write_text(json.dumps(made))
    answer("0a1b2c")


def once(command: list[str], output: Path, fault: str, *, on_gpu: bool) -> NoReturn:
    if command[0] == "--version":
        answer("trainer, version 0.1.0", int(fault == "version"))
    if command[1:] and command[0] == "probe" and fault == "fallback":
        answer("attention.flash   FAILS  -  -  b1\nattention.math   works  1.0  1e-3  b1")
    if command == ["probe"]:
        gpu = (
            "NVIDIA H200, compute capability 9.0, 139.8 GiB of its own"
            if on_gpu and fault != "gpu"
            else "none"
        )
        answer(f"GPU       {gpu}\ndriver    none")
    if command[0] == "probe":
        verdict = "FAILS" if fault == "kernels" else "works"
        answer(f"attention.flash   {verdict}  1.0  1e-3  b1\nattention.flash_attn_3  FAILS  -  -  b1")
    if command[0] == "verify-lora":
        answer("69 layers, all finite", 70 if fault == "proof" else 0)
    if fault != "no lora":
        lay(output / "short/lora/short.safetensors", "weights")
    profile = "cpu" if fault == "cpu" or not on_gpu else "hopper-fp8"
    answer(f"profile   {profile}   facts", 65 if fault == "train" else 0)


def execute(words: list[str], state: Path, fault: str) -> None:
    _, name, *command = words
    if not load(state / name)["running"]:
        answer("not running", 1)
    if command == ["trainer", "health"]:
        if fault == "health":
            answer("unhealthy: no heartbeat", 1)
        answer("healthy: phase train 40/1000000")
    assert command[:2] == ["python3", "-c"], command
    step = 0.0 if fault == "metrics" else next_stop(load(state / name)) + 0.0
    pages = {"/readyz": "ready", "/metrics": f"trainer_step {step}\ntrainer_healthy 1.0\n"}
    serve(pages, command[2])


def serve(pages: Mapping[str, str], code: str) -> None:
    """Run what the script would run in a container, against a server of our own."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(pages[self.path].encode())

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    assert code.count("9464") == 1
    try:
        exec(code.replace("9464", str(server.server_port)), {})
    finally:
        server.shutdown()
        server.server_close()


def next_stop(it: Mapping[str, Any]) -> int:
    """The step that a container's run is at: 40 after those that it began with."""
    return 40 * (1 + len(list(Path(it["output"]).glob("long/checkpoints/step-*"))))


def stop(words: list[str], state: Path, fault: str) -> None:
    _, option, seconds, name = words
    assert (option, seconds) == ("-t", "1800")
    it = load(state / name)
    number, ending = next_stop(it), ".tmp" if fault == "half a checkpoint" else ""
    if fault != "no checkpoint" and (fault != "old checkpoint" or number == 40):
        lay(Path(it["output"]) / f"long/checkpoints/step-{number:06}{ending}/state.json", "{}")
    (state / name).write_text(json.dumps({**it, "running": False, "code": 0 if fault == "stop" else 75}))


def inspect(words: list[str], state: Path, fault: str) -> None:
    it = load(state / words[3])
    shown = {
        "{{.State.Running}}": str(it["running"]).lower(),
        "{{.State.Health.Status}}": "starting" if fault == "docker health" else "healthy",
        "{{.State.ExitCode}}": it["code"],
    }
    answer(shown[words[2]])


def logs(words: list[str], state: Path, fault: str) -> None:
    answer(load(state / words[1])["log"])


def rm(words: list[str], state: Path, fault: str) -> None:
    for name in words[2:]:
        (state / name).unlink(missing_ok=True)
