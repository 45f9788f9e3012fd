"""Codecs around other codecs.

Import only the codec package. Start reading at `wrapper.py`, then `feedback.py`.
"""
