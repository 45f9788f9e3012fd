"""Codecs that send every value with fewer bits.

Import only the base modules of the codec package. Start reading at `integers.py`, then `blocks.py`.
"""
