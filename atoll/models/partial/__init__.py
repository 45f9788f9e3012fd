"""Models of which only a part has values, because the whole is too large for this machine.

May import torch only. Start reading at `build.py`.
"""

from atoll.models.partial.build import (
    Partly,
    Survey,
    build_partly,
    tensors_in,
    tensors_of,
)
from atoll.models.partial.call import NotPartly

__all__ = ["NotPartly", "Partly", "Survey", "build_partly", "tensors_in", "tensors_of"]
