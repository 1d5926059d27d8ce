"""Latent attention over paged rows that all heads share."""
