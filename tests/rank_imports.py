"""Imports that ranks of tests are forked with, kept out of every later collection of garbage."""

import gc

gc.disable()

import torch  # noqa: E402
import torch._dynamo  # noqa: E402

from trainer.modeling.vision import make_torchvision_importable  # noqa: E402

make_torchvision_importable()

import diffusers  # noqa: E402
import peft  # noqa: E402
import transformers  # noqa: E402

import trainer.engine.run  # noqa: E402

__all__ = ["diffusers", "peft", "torch", "trainer", "transformers"]

gc.freeze()
gc.enable()
