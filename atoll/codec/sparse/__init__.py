"""Codecs that send some numbers, or coefficients, of a vector.

Imports the codec room's base, `quantized.packing` and `wrappers.selecting`.
Start at `topk.py`.
"""
