"""A running straight line through what is left of something, in constant memory.

Exponentially weighted least squares: the weighted means, variances and the covariance of time and
value are updated with every sample (West, "Updating mean and variance estimates", CACM 22(9),
1979), older samples fading with the window.
"""

from __future__ import annotations

import math

LEAST_SPAN_S = 300.0
"""A line through less than five minutes says nothing about an hour."""
LEAST_R2 = 0.9
"""Share of the variance that a straight line must explain."""


class Trend:
    """Says when something runs out, if it shrinks steadily."""

    __slots__ = ("_began", "_covariance", "_first", "_mean_t", "_mean_x", "_var_t", "_var_x",
                 "_weight", "_when", "_window_s", "last")  # fmt: skip

    def __init__(self, *, window_s: float = 1_800.0) -> None:
        """Weigh a sample that is `window_s` old by 1/e."""
        self._window_s = window_s
        self._began = self._when = self._first = self.last = 0.0
        self._weight = 0.0
        self._mean_t = self._mean_x = 0.0
        self._var_t = self._var_x = self._covariance = 0.0

    def add(self, now: float, value: float) -> None:
        """Take a sample in."""
        if self._weight == 0.0:
            self._began, self._first = now, value
        fade = math.exp(-(now - self._when) / self._window_s) if self._weight else 0.0
        self._when, self.last = now, value
        before = self._weight * fade
        self._weight = before + 1.0
        t, x = now - self._began, value
        dt, dx = t - self._mean_t, x - self._mean_x
        share = 1.0 / self._weight
        self._mean_t += share * dt
        self._mean_x += share * dx
        keep = before / self._weight
        self._var_t = keep * (self._var_t + share * dt * dt)
        self._var_x = keep * (self._var_x + share * dx * dx)
        self._covariance = keep * (self._covariance + share * dt * dx)

    def full_in_s(self) -> float | None:
        """Return the seconds until zero along the line; None: it does not shrink steadily."""
        span_s = self._when - self._began
        if span_s < LEAST_SPAN_S or self._var_t <= 0 or self._var_x <= 0:
            return None
        slope = self._covariance / self._var_t
        fits = self._covariance**2 / (self._var_t * self._var_x)
        if slope >= 0 or fits < LEAST_R2:
            return None
        return max(0.0, -self.last / slope)
