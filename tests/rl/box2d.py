"""Environments of the extra `box2d`, which has no wheels for every version of Python."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

NEEDS_BOX2D = pytest.mark.skipif(find_spec("Box2D") is None, reason="pip install 'atoll[box2d]'")
LANDER = "LunarLander-v3"
