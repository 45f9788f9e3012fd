"""Trained models in formats of other programs: a Hugging Face folder, GGUF, ONNX.

May import errors, config, models, data and checkpoint. Start with `opened.py`.
"""
