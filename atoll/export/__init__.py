"""Trained models in the formats of others: a Hugging Face folder, GGUF, ONNX.

May import errors, models, data, checkpoint, config, devices. Start with `opened.py`.
"""
