"""Codecs that send some of a vector's values or coefficients.

Imports the codec room's base, `quantized.packing` and `wrappers.selecting`.
Start at `topk.py`.
"""
