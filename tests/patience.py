"""How long tests wait: as long as a busy machine may need, for every wait ends when it can."""

from __future__ import annotations

PATIENCE_S = 180.0
"""A bound that only guards against hanging: whatever is waited for is there long before, even where
several suites share two cores."""

PROMPT_S = 30.0
"""What "at once" may take on a busy machine. A test that asserts it makes sure that the wrong way
would take much longer: the pause or time limit that is not to be waited for is to be minutes."""
