"""Messages, frames and their limits, as they cross between processes. No sockets, no torch.

May import errors and digest only.
Start reading at `messages.py` (every message), then `frames.py` (their layout) and `limits.py`.
"""
