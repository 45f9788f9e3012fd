"""Device selection, capabilities and copies: the only code for particular kinds of devices.

Built on torch.accelerator, so CUDA, ROCm, XPU, MPS and registered backends are alike. May import
config and errors; loads torch, so others import it where they use it. Start with choose.py.
"""
