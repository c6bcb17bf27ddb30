"""The tiny base's makers: drawings, VAE, text encoders, the transformer's run, evaluation, model card."""
