"""The one place that knows devices: which one computes, what it can do, copies to and from it.

Built on torch.accelerator, so CUDA, ROCm, XPU, MPS and registered backends are alike. May import
config and errors; loads torch, so others import it where they use it. Start with choose.py.
"""
