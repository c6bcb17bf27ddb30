"""What made the tiny base: drawings, VAE, text encoders, the transformer's run, evaluation, model card."""
