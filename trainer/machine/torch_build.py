"""Facts of the installed torch, learned without importing it into this process."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path

from trainer.config.interpreter import python
from trainer.errors import HardwareError
from trainer.files import codec
from trainer.files.cachefile import read_entries, update_entries
from trainer.machine.facts import TorchBuild, Version, version_from

FILE_NAME = "torch_build.json"
_CHILD_SECONDS = 300
_PARSING = threading.Lock()
"""CPython 3.11 fails where two threads make syntax trees at once, and a page's facts are read in threads."""
_CHILD = """
import json, torch
# torch 2.11's own get_arch_list() is empty where no GPU is visible
flags = torch._C._cuda_getArchFlags() if torch.version.cuda else None
print(json.dumps((flags or "").split()))
"""


def read_torch_build(*, recorded: Path | None, cache_dir: Path, starts: bool = True) -> TorchBuild | None:
    """The installed torch; None without one.

    `recorded` is a JSON file written at image build (see `write_recorded`). Otherwise version and CUDA come
    from torch's own version file, and a CUDA build's architectures, which are compiled in, from one child
    process whose answer stays in `cache_dir` until torch is installed anew; they are unknown, and empty,
    where nobody asked yet and `starts` is False. Raises HardwareError where torch does not import.
    """
    if recorded is not None:
        return read_recorded(recorded)
    folder = torch_folder()
    if folder is None:
        return None
    version, cuda = parse_version_file((folder / "version.py").read_text(), str(folder / "version.py"))
    if cuda is None:
        return TorchBuild(version=version, cuda=None, arch_list=())
    cache, key = cache_dir / FILE_NAME, f"{folder} {(folder / 'version.py').stat().st_mtime_ns}"
    known = read_entries(cache).get(key)
    if not isinstance(known, list) or not known:
        known = _ask_child(_CHILD) if starts else []
        if known:  # a CUDA build has some: an empty answer is none
            update_entries(cache, lambda entries: entries.update({key: known}))
    return TorchBuild(version=version, cuda=cuda, arch_list=tuple(map(str, known)))


def read_recorded(path: Path) -> TorchBuild:
    """The build as an image recorded it; raises HardwareError naming the file."""
    try:
        text = path.read_text()
    except OSError as error:
        raise HardwareError(
            f"the recorded build of torch cannot be read ({error.strerror})",
            where=f"TRAINER_TORCH_FACTS={path}",
            remedy="unset the variable: torch is asked then",
        ) from error
    return codec.from_json(TorchBuild, text, f"TRAINER_TORCH_FACTS={path}")


def write_recorded(path: Path) -> None:
    """Record the installed torch, for an image build: `python -m trainer.machine.torch_build FILE`."""
    path.write_text(codec.to_json(read_torch_build(recorded=None, cache_dir=path.parent)))


def torch_folder() -> Path | None:
    """Folder of the installed torch, found without importing it."""
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def parse_version_file(text: str, where: str) -> tuple[Version, Version | None]:
    """(version, CUDA) from the text of torch/version.py, which every wheel has; a CPU build has no CUDA."""
    values: dict[str, object] = {}
    with _PARSING:
        tree = ast.parse(text)
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            names = (one for one in ast.walk(node) if isinstance(one, ast.Name))
            values |= {one.id: node.value.value for one in names if isinstance(one.ctx, ast.Store)}
    version, cuda = values.get("__version__"), values.get("cuda")
    if not isinstance(version, str):
        what = "torch's version file names no version"
        raise HardwareError(what, where=where, remedy="install torch again")
    return version_from(version), version_from(cuda) if isinstance(cuda, str) else None


def _ask_child(program: str) -> list[str]:
    try:
        child = subprocess.run(
            python("-c", program), capture_output=True, text=True, timeout=_CHILD_SECONDS, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        last = str(error.stderr or error).strip().splitlines()[-1]
        raise HardwareError(
            f"torch does not import: {last}",
            where=str(torch_folder()),
            remedy="a foreign cuDNN on LD_LIBRARY_PATH is a common cause; else install torch again",
        ) from error
    arch_list: list[str] = json.loads(child.stdout)
    return arch_list


if __name__ == "__main__":
    write_recorded(Path(sys.argv[1]))
