"""Interactions: Keras layers that each give one term of the logit (docs/layers.md)."""
