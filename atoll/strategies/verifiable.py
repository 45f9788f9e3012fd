"""Which jobs can have their rounds computed again by other members (`trust = "audit"`). No torch.

A refused job is valid otherwise: a part of its state is in no commitment, or its bits depend on the
machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from atoll.config import JobSpec
from atoll.errors import ConfigError
from atoll.methods.codecs import CODECS
from atoll.strategies.resolve import Resolved

AUDIT = "audit"
LEAST_SHARE, LARGEST_SHARE = 0.01, 0.05
OPTIMIZERS = ("adamw", "sgd")
LEAST_MEMBERS = 3
"""A member, its checker and a judge."""


def check_verified(spec: JobSpec, resolved: Resolved) -> None:
    """Refuse `trust = "audit"` for what cannot be verified; names every reason.

    Raises:
        ConfigError: the job cannot be verified.
    """
    if spec.job.trust != AUDIT:
        return
    share = spec.job.audit_share
    if not LEAST_SHARE <= share <= LARGEST_SHARE:
        raise ConfigError(
            "audit_share is out of range", given=share,
            expected=f"{LEAST_SHARE} to {LARGEST_SHARE}, a share of all member-rounds",
        )  # fmt: skip
    wrong = list(_reasons(spec, resolved))
    if wrong:
        raise ConfigError(
            'the rounds of this job cannot be verified (trust = "audit")',
            given="; ".join(given for given, _ in wrong),
            expected="; ".join(expected for _, expected in wrong),
            remedy='change these, or set trust = "members" in [job]',
        )


def _reasons(spec: JobSpec, resolved: Resolved) -> Iterator[tuple[str, str]]:
    """Yield what is given and what is needed instead."""
    yield from _of_method(resolved)
    job, train = spec.job, spec.train
    needs = [
        (spec.kind == "trainer" and not job.code, f"kind {spec.kind}", "the trainer without code"),
        (
            not spec.tune.active, "a model that is tuned",
            "[model] and [data] without [tune], whose examples the checkers do not have",
        ),
        (
            job.route == "relay", f"route = {job.route!r}",
            'route = "relay", where the reducer sees every packet',
        ),
        (
            job.device == "cpu", f"device = {job.device!r}",
            'device = "cpu", where equal steps give equal bits',
        ),
        (train.precision in ("auto", "fp32"), f"precision = {train.precision!r}", '"fp32"'),
        (not train.compile, "compile = true", "compile = false"),
        (job.threads > 0, "threads = 0", "a number of threads, the same on every machine"),
        (
            job.nodes >= LEAST_MEMBERS, f"nodes = {job.nodes}",
            f"nodes = {LEAST_MEMBERS} or more: member, checker and judge",
        ),
        (train.optimizer in OPTIMIZERS, f"optimizer = {train.optimizer!r}", '"adamw" or "sgd"'),
    ]  # fmt: skip
    yield from ((given, expected) for fits, given, expected in needs if not fits)


def _of_method(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """Yield the options of a strategy that cannot be verified, and what is needed instead."""
    method = resolved.method
    if method.name != "diloco" or resolved.inner != "local":
        yield (
            f"outer = {method.name!r} with inner = {resolved.inner!r}",
            'outer = "diloco" with inner = "local"',
        )
    for name, needed in (("shared_steps", 0), ("drop", 0.0), ("prune", 0.0)):
        given = getattr(method, name, needed)
        if given != needed:
            yield f"{name} = {given}", f"{name} = {needed:g}"
    if getattr(method, "weight", "tokens") == "fednova":
        yield 'weight = "fednova"', 'weight = "tokens"'
    # Not every word is a codec (`topk:1e-3`); an unknown one is refused when it is built.
    words = re.findall(r"[a-z][a-z0-9_]*", resolved.codec)
    rows = [CODECS[word] for word in words if word in CODECS]
    if any(row.remembers or row.needs_allgather or row.name == "auto" for row in rows):
        yield f"codec = {resolved.codec!r}", 'a codec without a memory, e.g. "int8" or "fp16"'
    if not resolved.aggregation.robust:
        yield (
            f"admission = {resolved.aggregation.admission!r}",
            'admission = "norms", so that no run starts from parameters of one member',
        )
