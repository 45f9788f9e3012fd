"""What a job needs, predicted before it runs: bytes per rank, and seconds per batch of a pipeline.

May import config, models, strategies, train and island; for memory torch makes meta tensors only.
Start with memory.py; for pipelines with pipelines.py, which loads no torch.
"""
