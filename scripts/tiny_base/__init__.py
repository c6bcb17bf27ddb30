"""What `scripts/train_tiny_base.py` is made of: drawings, VAE, text encoders, evaluation."""
