"""Codecs that send some of a vector's values or coefficients.

Import only the base modules, `quantized.packing` and `wrappers.selecting`. Start reading at
`topk.py`.
"""
