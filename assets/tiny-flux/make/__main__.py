"""Make the tiny base: a text-to-image model in FLUX.1's architecture that is small and really draws.

    npm pack @iconify-json/fluent-emoji-flat@1.2.6 @iconify-json/fluent-emoji-high-contrast@1.2.6
    PYTHONPATH=assets/tiny-flux python -m make --icons .          # all stages, on a GPU if there is one

Needs the extras `tiny-base` and `plots` (pip install -c constraints.txt -e '.[tiny-base,plots]').
Each stage starts from what the one before left in build/tiny-flux: data (drawings and captions), vae,
text (both encoders), transformer (by `trainer train`, method full, from random weights), assemble (into
assets/tiny-flux), card (pictures, figures, the model card). Figures of the committed model are in its README.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from make import card, drawings

FAMILY_CONFIGS = Path("trainer/families/configs/flux1_dev")
WORK = Path("build/tiny-flux")
DATA, BASE, RUN, LOGS = WORK / "data", WORK / "base", WORK / "run", WORK / "logs"
ASSETS = Path("assets/tiny-flux")
CONFIG = ASSETS / "make" / "transformer.yaml"


def make_data(arguments: argparse.Namespace) -> None:
    """Drawings, image sets and names.json below DATA."""
    sets = drawings.read_packages(arguments.icons)
    everything = drawings.all_names(sets)[: arguments.limit]
    vae, vae_held_out = drawings.split_names(everything, drawings.VAE_HELD_OUT)
    trained, held_out = drawings.split_names(drawings.explained_names(everything), drawings.HELD_OUT)
    shutil.rmtree(DATA, ignore_errors=True)
    _render(sets, everything)
    count = drawings.write_image_sets(_samples(trained), DATA)
    names = {"vae": vae, "vae_held_out": vae_held_out, "trained": trained, "held_out": held_out}
    (DATA / "names.json").write_text(json.dumps(names, indent=1) + "\n")
    print(f"VAE: {len(vae)} things, {len(vae_held_out)} held out")
    print(f"all else: {len(trained)} things under {count} captions, {len(held_out)} names held out")


def make_vae(arguments: argparse.Namespace) -> None:
    """Train the VAE and write BASE/vae."""
    from make import vae

    pixels = vae.stack(
        [one.picture for hand in drawings.PACKAGES for one in drawings.read(DATA, _names("vae"), hand)]
    )
    with logger("vae") as log:
        model = vae.train(
            pixels, device=arguments.device, seed=arguments.seed, log=log, steps=arguments.vae_steps
        )
        pictures = vae.on_white(pixels).to(arguments.device)
        log({"psnr_db": vae.peak_signal_to_noise(model, pictures)})
    vae.save(model, BASE / "vae")


def make_text(arguments: argparse.Namespace) -> None:
    """Train BASE's tokenizers and text encoders on captions and the VAE's latents of their pictures."""
    import torch
    from diffusers import AutoencoderKL

    from make import text, vae

    model = AutoencoderKL.from_pretrained(BASE / "vae").to(arguments.device)
    made = _samples(_names("trained"))
    pixels = vae.stack([sample.picture for sample in made]) * 2 - 1
    latents = vae.encode_means(model, pixels.to(arguments.device))
    captions = [(line, i) for i, sample in enumerate(made) for line in sample.captions.values()]
    with logger("text") as log:
        tokenizers, encoders = text.train(
            [caption for caption, _ in captions],
            [owner for _, owner in captions],
            (latents - model.config.shift_factor) * model.config.scaling_factor,
            device=arguments.device,
            seed=arguments.seed,
            log=log,
            steps=arguments.text_steps,
        )
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(BASE / name)
    for name, encoder in encoders.items():
        encoder.to("cpu", torch.float16).save_pretrained(BASE / name)
        # stored small, computed like the other components: transformers takes the type from here
        path = BASE / name / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}, indent=2) + "\n")


def make_transformer(arguments: argparse.Namespace) -> None:
    """Train RUN/model/transformer by `trainer train`; a run that was stopped goes on."""
    shutil.copy(FAMILY_CONFIGS / "model_index.json", BASE)
    shutil.copytree(FAMILY_CONFIGS / "scheduler", BASE / "scheduler", dirs_exist_ok=True)
    (BASE / "transformer").mkdir(exist_ok=True)
    # not distilled, `guidance_embeds: false`: there is no guidance value to get wrong
    shutil.copy(CONFIG.with_suffix(".json"), BASE / "transformer" / "config.json")
    settings = [f"--set={setting}" for setting in (f"train.seed={arguments.seed}", *arguments.set)]
    subprocess.run([sys.executable, "-m", "trainer", "train", str(CONFIG), *settings], check=True)


def assemble(arguments: argparse.Namespace) -> None:
    """Write ASSETS: BASE with the trained transformer."""
    for component in BASE.iterdir():
        shutil.rmtree(ASSETS / component.name, ignore_errors=True)
    shutil.copytree(BASE, ASSETS, ignore=shutil.ignore_patterns("transformer"), dirs_exist_ok=True)
    shutil.copytree(RUN / "model" / "transformer", ASSETS / "transformer")
    size = sum(
        path.stat().st_size for path in ASSETS.rglob("*") if path.is_file() and path.parent.name != "make"
    )
    print(f"{ASSETS}: {size / 1e6:.1f} MB")


def make_card(arguments: argparse.Namespace) -> None:
    """Write the sample grid, curves, recognition figures and README of ASSETS."""
    card.write(ASSETS, DATA, LOGS, RUN)


STAGES: dict[str, Callable[[argparse.Namespace], None]] = {
    "data": make_data,
    "vae": make_vae,
    "text": make_text,
    "transformer": make_transformer,
    "assemble": assemble,
    "card": make_card,
}


@contextlib.contextmanager
def logger(stage: str) -> Iterator[Callable[[dict[str, float]], None]]:
    """A function that writes a row of one stage into LOGS; the last row has the stage's seconds."""
    LOGS.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with (LOGS / f"{stage}.jsonl").open("w", buffering=1) as file:

        def write(row: dict[str, float]) -> None:
            file.write(json.dumps(row) + "\n")

        yield write
        write({"seconds": round(time.monotonic() - started, 1)})


def _render(sets: dict[str, Any], names: Sequence[str]) -> None:
    """Every name by every hand; kept in DATA with their transparency, which image sets do not have."""
    for hand in drawings.PACKAGES:
        (DATA / "transparent" / hand).mkdir(parents=True)
        for name in tqdm(names, desc=f"{hand} drawings"):
            drawings.render(sets[hand], name).picture.save(DATA / "transparent" / hand / f"{name}.png")


def _names(split: str) -> list[str]:
    names: dict[str, list[str]] = json.loads((DATA / "names.json").read_text())
    return names[split]


def _samples(names: Sequence[str]) -> list[drawings.Sample]:
    pairs = zip(*(drawings.read(DATA, names, hand) for hand in ("flat", "ink")), strict=True)
    return [sample for flat, ink in pairs for sample in drawings.samples(flat, ink)]


def main() -> None:
    """The command line."""
    import torch

    from make import text, vae

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--icons", type=Path, default=Path(), help="folder with the two packed packages")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vae-steps", type=int, default=vae.STEPS)
    parser.add_argument("--text-steps", type=int, default=text.STEPS)
    parser.add_argument("--limit", type=int, help="only so many things, for a quick try")
    parser.add_argument("--set", action="append", default=[], help="a setting of the transformer's run")
    arguments = parser.parse_args()
    for stage in arguments.stages:
        print(f"== {stage}", flush=True)
        started = time.monotonic()
        STAGES[stage](arguments)
        print(f"== {stage}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
