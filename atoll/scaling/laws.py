"""The laws that can be fitted, each a sum of powers.

With N parameters, D tokens, M members and H steps between two rounds:

    L(N), L(D)   E + A / N^a, and E + B / D^b; or without E, a pure power
    L(N, D)      E + A / N^a + B / D^b
                 (Hoffmann et al. 2022, https://arxiv.org/abs/2203.15556, section 3.3)
    with M, H    M^m H^h multiplies the whole sum, its N term or its D term; with N and M alone also
                 E + A / N^(a + m M) and E + A / N^a + B M^m, and A M^m / N^a without E
                 (after Charles et al. 2025, https://arxiv.org/abs/2503.09799)

All of them are `log L = logsumexp over terms of (linear) + (linear)` in the logarithms of their
constants and in their exponents, so that one objective with one gradient serves them all.

Differs from the papers:
  * H is a variable, as M is; Charles et al. fit N and M for each H.
  * Which term M and H multiply is chosen by the runs (fit.py), not beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.errors import ConfigError, OneValueOnly, TooFewPoints
from atoll.scaling.points import LETTERS, VARIABLES, Point, values_of

Array = NDArray[np.float64]

MEMBERS_TIMES_SIZE = "members x ln params"
"""A feature that is no logarithm: M ln N, of the law whose exponent depends on M."""

EXPONENTS = {"params": "a", "tokens": "b", "members": "m", "every": "h"}


@dataclass(frozen=True, slots=True)
class Slope:
    """An exponent: `name`, its sign in the formula, and the feature that it multiplies."""

    name: str
    sign: float
    feature: str


@dataclass(frozen=True, slots=True)
class Term:
    """A summand: `constant` times powers."""

    constant: str
    slopes: tuple[Slope, ...] = ()


@dataclass(frozen=True, slots=True)
class Law:
    """One formula for the loss."""

    variables: tuple[str, ...]
    shape: str
    """Which of the formulas of these variables: `whole`, `params`, `tokens`, `power`, ..."""
    equation: str
    terms: tuple[Term, ...]
    shared: tuple[Slope, ...] = ()
    """Powers that multiply the whole sum."""

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the factors, one per term."""
        return tuple(term.constant for term in self.terms)

    @property
    def exponents(self) -> tuple[str, ...]:
        """Names of the exponents, each once."""
        slopes = [slope for term in self.terms for slope in term.slopes]
        return tuple(dict.fromkeys(slope.name for slope in (*slopes, *self.shared)))

    @property
    def title(self) -> str:
        """E.g. `L(N, D)`."""
        return f"L({', '.join(LETTERS[name] for name in self.variables)})"

    @property
    def floor(self) -> bool:
        """Whether it has the constant E that no size or amount of data goes below."""
        return "E" in self.constants

    def least_values(self, variable: str) -> int:
        """Return how many different values of a variable its constants take."""
        if variable in ("members", "every"):
            return 2
        return 3 if self.floor else 2


def features(values: Mapping[str, Array]) -> dict[str, Array]:
    """Return what exponents multiply, from the logarithms of the variables."""
    found = {name: values[name] for name in VARIABLES if name in values}
    if "members" in found and "params" in found:
        found[MEMBERS_TIMES_SIZE] = np.exp(found["members"]) * found["params"]
    return found


def arrays(theta: Mapping[str, float | Sequence[float]]) -> dict[str, Array]:
    """Return constants and exponents, one or many of each, for `log_terms`."""
    return {name: np.asarray(value, dtype=np.float64) for name, value in theta.items()}


def log_terms(law: Law, theta: Mapping[str, Array], values: Mapping[str, Array]) -> Array:
    """Return the logarithm of each term, shared powers included; `(terms, ...)`.

    Args:
        law: The law.
        theta: ln of each constant and each exponent, as the law's equation has them.
        values: ln of each variable.
    """
    at = features(values)
    shared = sum((s.sign * theta[s.name] * at[s.feature] for s in law.shared), np.float64(0.0))
    rows = []
    for term in law.terms:
        powers = (slope.sign * theta[slope.name] * at[slope.feature] for slope in term.slopes)
        rows.append(sum(powers, theta[term.constant] + shared))
    return np.stack(np.broadcast_arrays(*rows))


def laws_of(variables: Sequence[str]) -> list[Law]:
    """Return every law of these variables, the simplest first.

    Raises:
        ConfigError: there is neither N nor D among them, or a name is unknown.
    """
    named = tuple(name for name in VARIABLES if name in variables)
    strange = sorted(set(variables) - set(VARIABLES))
    if strange or not {"params", "tokens"} & set(named):
        raise ConfigError(
            "there is no scaling law of these variables",
            given=", ".join(strange or named) or "none",
            expected="params or tokens (or both), and then also members and every",
            remedy="e.g. --law params,tokens or --law params,members,every",
        )
    base = [name for name in named if name in ("params", "tokens")]
    more = [name for name in named if name in ("members", "every")]
    powers = tuple(Slope(EXPONENTS[name], 1.0, name) for name in more)
    places = ["whole", *base] if more else [""]
    found = [_law(named, base, powers, place, floor=True) for place in places]
    if len(base) == 1:
        found.insert(0, _law(named, base, powers, "whole" if more else "", floor=False))
    if named == ("params", "members"):
        found += _of_members()
    return found


def _law(
    named: tuple[str, ...],
    base: Sequence[str],
    powers: tuple[Slope, ...],
    place: str,
    *,
    floor: bool,
) -> Law:
    """Return the sum of a term per size variable, with powers at `place`."""
    terms = [Term("E")] if floor else []
    words = ["E"] if floor else []
    factor = " ".join(f"{LETTERS[slope.feature]}^{slope.name}" for slope in powers)
    for constant, name in (("A", "params"), ("B", "tokens")):
        if name in base:
            own = powers if place == name else ()
            terms.append(Term(constant, (Slope(EXPONENTS[name], -1.0, name), *own)))
            top = f"{constant} {factor}" if own else constant
            words.append(f"{top} / {LETTERS[name]}^{EXPONENTS[name]}")
    equation = " + ".join(words)
    shared = powers if place == "whole" else ()
    if shared:
        alone = equation.replace(" /", f" {factor} /")
        equation = f"({equation}) {factor}" if len(words) > 1 else alone
    shape = place or "sum"
    return Law(named, shape if floor else "power", equation, tuple(terms), shared)


def _of_members() -> list[Law]:
    named = ("params", "members")
    size = Slope("a", -1.0, "params")
    steeper = (size, Slope("m", -1.0, MEMBERS_TIMES_SIZE))
    beside = Term("B", (Slope("m", 1.0, "members"),))
    return [
        Law(named, "bent", "E + A / N^(a + m M)", (Term("E"), Term("A", steeper))),
        Law(named, "beside", "E + A / N^a + B M^m", (Term("E"), Term("A", (size,)), beside)),
    ]


def check_enough(law: Law, points: Sequence[Point]) -> None:
    """Check that the points can distinguish the constants of a law.

    Raises:
        OneValueOnly: a variable has too few different values.
        TooFewPoints: there are no more points than constants.
    """
    for name in law.variables:
        values, least = values_of(points, name), law.least_values(name)
        if len(values) < least:
            raise OneValueOnly(
                f"the runs do not differ enough in {name} for {law.title} = {law.equation}",
                given=f"{name} = " + ", ".join(f"{value:g}" for value in values),
                expected=f"at least {least} different values",
                remedy=f"add runs of other {name}, or fit a law without it: --law NAMES",
            )
    size = len(law.constants) + len(law.exponents)
    if len(points) <= size:
        raise TooFewPoints(
            f"there are too few runs for {law.title} = {law.equation}",
            given=f"{len(points)} runs, {size} constants",
            expected=f"at least {size + 1} runs: one more than constants, so that it can be wrong",
            remedy="add runs (atoll scaling sweep), or fit a law of fewer variables: --law NAMES",
        )
