"""Interactions:

Keras layers that each give one term of the logit. docs/layers.md lists them and says how to write
your own.
"""
