"""Imports that ranks of tests are forked with."""

import torch
import torch._dynamo

from trainer.modeling.vision import make_torchvision_importable

make_torchvision_importable()

import diffusers  # noqa: E402
import peft  # noqa: E402
import transformers  # noqa: E402

import trainer.engine.run  # noqa: E402

__all__ = ["diffusers", "peft", "torch", "trainer", "transformers"]
