"""The part of `summary.json` about policies and their critic. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.config.rl_roles import ACTOR, CRITICS, MemberRole, member_roles
from atoll.config.rl_tables import RlTable

Results = Mapping[str, Mapping[str, Any]]
Points = Sequence[Mapping[str, Any]]

DROPPED = ("stale", "duplicate", "not_finite")
"""Reasons for which a trajectory is dropped."""


OF_TEXT = ("score_before", "score_after", "texts")
"""Figures of language models only: mean rewards of an evaluation, and completions in it."""


def rl_summary(
    rl: RlTable, *, results: Results, points: Points, sent: Mapping[str, float]
) -> dict[str, Any]:
    """Return the results of each policy and of the critic (keys: docs/reference/run_files.md).

    A lost member has no entry in `results`; its last measurements count. `sent` are the bytes that
    the hub counted, by member.
    """
    roles = {f"w{slot}": role for slot, role in enumerate(member_roles(rl))}
    rows = {name: _member(name, role, results, points) for name, role in roles.items()}
    for name in rows.keys() & sent.keys():
        rows[name]["sent_bytes"] = int(sent[name])
    policies = [
        _policy(policy.name, policy.env, policy.steps or rl.steps, rows.values())
        for policy in rl.policies
    ]
    critic = next((row for row in rows.values() if row["role"] in CRITICS), None)
    steps, wall_s = sum(p["env_steps"] for p in policies), _wall_s(results)
    total = sum(row["sent_bytes"] for row in rows.values())
    return {
        "algorithm": rl.algorithm,
        "critic": "none" if rl.algorithm == "grpo" else rl.critic,
        "values": rl.values,
        "env_steps": steps,
        "env_steps_per_s": steps / wall_s if wall_s else None,
        "bytes_per_env_step": total / steps if steps else None,
        "policies": policies,
        "critic_member": critic,
    }


def curve(points: Points, members: Iterable[str], name: str) -> tuple[list[float], list[float]]:
    """Return environment steps and one value over them, for all actors of a policy.

    Each actor counts its own steps; the policy's steps are their sum.
    """
    steps: dict[str, float] = {}
    newest: dict[str, float] = {}
    wanted, xs, ys = set(members), [], []
    for point in points:
        member, values = str(point["member"]), point["values"]
        if member not in wanted:
            continue
        steps[member] = float(values.get("env_steps", steps.get(member, 0.0)))
        if name in values:
            newest[member] = float(values[name])
            xs.append(sum(steps.values()))
            ys.append(sum(newest.values()) / len(newest))
    return xs, ys


def _member(name: str, role: MemberRole, results: Results, points: Points) -> dict[str, Any]:
    """Return the figures of one member, from its result or else its measurements."""
    latest: dict[str, Any] = {}
    for point in points:
        if point["member"] == name:
            latest |= point["values"]
    result = results.get(name, {})
    own: Mapping[str, Any] = result.get("rl") or {}

    def figure(key: str, *, measured: str = "") -> Any:
        value = own.get(key)
        return value if value is not None else latest.get(measured or key)

    return {
        "member": name,
        "role": role.role,
        "policy": role.policy,
        "finished": bool(own),
        "env_steps": int(figure("env_steps") or 0),
        "episodes": int(figure("episodes") or 0),
        "return_first": own.get("return_first", _first_return(points, name)),
        "return_last": figure("return_last", measured="return"),
        "return_best": figure("return_best"),
        "updates": int(figure("updates") or 0),
        "trajectories": int(figure("trajectories") or 0),
        "dropped": _counts(own.get("dropped")),
        "staleness": _counts(own.get("staleness")),
        "queue_wait_s": float(figure("queue_wait_s") or 0.0),
        "sent_bytes": int(figure("sent_bytes") or result.get("sent_bytes") or 0),
        "gif": str(own.get("gif") or ""),
        **{name: own[name] for name in OF_TEXT if own.get(name) is not None},
    }


def _policy(
    name: str, env: str, steps: int, members: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the figures of one policy over all its actors."""
    own = [row for row in members if row["role"] == ACTOR and row["policy"] == name]
    best = [row["return_best"] for row in own if row["return_best"] is not None]
    return {
        "policy": name,
        "env": env,
        "members": [row["member"] for row in own],
        "finished": all(row["finished"] for row in own),
        "steps": steps,
        "env_steps": sum(row["env_steps"] for row in own),
        "episodes": sum(row["episodes"] for row in own),
        "return_first": _mean(row["return_first"] for row in own),
        "return_last": _mean(row["return_last"] for row in own),
        "return_best": max(best, default=None),
        "updates": max((row["updates"] for row in own), default=0),
        "dropped": _added(row["dropped"] for row in own),
        "queue_wait_s": sum(row["queue_wait_s"] for row in own),
        "sent_bytes": sum(row["sent_bytes"] for row in own),
        "gif": next((row["gif"] for row in own if row["gif"]), ""),
        **{name: row[name] for row in own[:1] for name in OF_TEXT if name in row},
    }


def step_word(rl: Mapping[str, Any]) -> str:
    """Return the word for a step: completions for language models, which have no environment."""
    text = all(str(policy["env"]).startswith("text:") for policy in rl["policies"])
    return "completion" if text else "environment step"


def _first_return(points: Points, member: str) -> float | None:
    for point in points:
        if point["member"] == member and "return" in point["values"]:
            return float(point["values"]["return"])
    return None


def _counts(found: Any) -> dict[str, int]:
    """Return a member's counts by word, whole numbers only."""
    return {str(k): int(v) for k, v in found.items()} if isinstance(found, Mapping) else {}


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    both: dict[str, int] = dict.fromkeys(DROPPED, 0)
    for one in counts:
        for word, count in one.items():
            both[word] = both.get(word, 0) + count
    return both


def _wall_s(results: Results) -> float:
    return max((float(result.get("wall_s") or 0.0) for result in results.values()), default=0.0)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
