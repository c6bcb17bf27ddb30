"""The LoRA of a run as its page offers it: proved, or of an earlier step, and the best one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.telemetry.run_folder.results import BEST_FOLDER, LORA_FOLDER, lora_step, read_best
from trainer.telemetry.runs import Run, State

ENDED_WELL = (State.FINISHED, State.FINISHED_EARLY)
_PROVED = "Proved: "
_START = "run folder "
"""Beginning of a log line: each accepted start writes it, and one that is refused does not."""


@dataclass(frozen=True, kw_only=True)
class FileView:
    """A file to download."""

    id: str
    name: str
    bytes: int


Offered = tuple[tuple[FileView, str], ...]
"""LoRA files, each with the programs that load it."""


@dataclass(frozen=True, kw_only=True)
class ResultView:
    """LoRA files to take away, and what they are."""

    title: str
    text: str
    proved: bool
    """Whether the run's last start proved them, and ended well."""
    files: Offered
    best: str
    """The step and loss of the best LoRA on held-out samples beside those of the last one; empty where that
    is the best, and where none is kept.
    """
    best_files: Offered


def result_view(run: Run, messages: Sequence[str], files: Sequence[FileView]) -> ResultView | None:
    """The result of a run that has ended, by the messages of its log; None without one."""
    offered = tuple(_loras(files, LORA_FOLDER))
    if not offered or run.state is State.RUNNING:
        return None
    starts = [place for place, text in enumerate(messages) if text.startswith(_START)]
    last_start = messages[starts[-1] if starts else 0 :]
    said = [text.partition(_PROVED)[2] for text in last_start if _PROVED in text]
    best = _best(run)
    best_files = tuple(_loras(files, BEST_FOLDER)) if best else ()
    if said and run.state in ENDED_WELL:
        title, text = "The LoRA is proved", said[-1][:1].upper() + said[-1][1:]
    else:
        title, text = _earlier(run)
    return ResultView(
        title=title,
        text=text,
        proved=bool(said) and run.state in ENDED_WELL,
        files=offered,
        best=best,
        best_files=best_files,
    )


def _earlier(run: Run) -> tuple[str, str]:
    """Title and text of a LoRA that the run had before its last start, or before that ended badly."""
    step = lora_step(run.folder)
    if step is None:
        text = f"The run is at step {run.step}. `trainer verify-lora` proves the file."
        return "The LoRA of an earlier start", text
    went_on = f", before the run went on to step {run.step}" if step < run.step else ""
    return f"The LoRA of step {step}", f"It was proved when it was written{went_on}."


def _best(run: Run) -> str:
    """The line about the best LoRA; see `ResultView.best`."""
    best, measured = read_best(run.folder), [row for row in run.rows if "validation_data" in row]
    if best is None or not measured or best["step"] == measured[-1]["step"]:
        return ""
    last, loss = measured[-1], f"{best['validation_loss']:.3g}"
    if last["validation_data"] != best["validation_data"]:
        return f"Best on other held-out samples: step {best['step']}, {loss}"
    ended = last.get("validation_loss")
    end = f"{ended:.3g}" if ended is not None and math.isfinite(ended) else "is not finite"
    return f"Best on held-out samples: step {best['step']}, {loss}; the last {end}"


def _loras(files: Sequence[FileView], folder: str) -> Iterator[tuple[FileView, str]]:
    for one in files:
        if one.name.startswith(f"{folder}/") and one.name.endswith(".safetensors"):
            yield one, "ComfyUI" if one.name.endswith(".comfyui.safetensors") else "diffusers"
