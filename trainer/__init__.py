"""Training appliance: LoRA and full fine-tunes of diffusion transformers, planned, measured and proved."""

__version__ = "0.1.0"
