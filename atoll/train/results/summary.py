"""`summary.json`: the figures of a run, from what members reported. Loads no torch."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from atoll.config import JobSpec
from atoll.config.loss_unit import loss_unit
from atoll.errors import StorageFull
from atoll.rounds.replicas import compare
from atoll.strategies.resolve import resolve
from atoll.train.results import data_account
from atoll.train.results.rl_summary import rl_summary

SUMMARY_NAME = "summary.json"
FP32_BYTES = 4
PROCESS_BEGAN = "process_began"
"""Value of a process's point with the totals that it continues from."""
ADDED = ("tokens", "samples_given", "wall_s", "compute_s", "sent_bytes", "received_bytes")
"""Totals that are added over the processes of a member: one that was killed has done its work."""

OF_HUB = ("node", "sent_bytes", "received_bytes")
"""Figures of a member that the hub counts itself."""

Results = Mapping[str, Mapping[str, Any]]
Points = Sequence[Mapping[str, Any]]


class Rounds(NamedTuple):
    """Numbers of rounds."""

    committed: int = 0
    aborted: int = 0


NO_ROUNDS = Rounds()


def summarise(
    *,
    job: str,
    spec: JobSpec,
    results: Results,
    points: Points,
    rounds: Rounds = NO_ROUNDS,
    paths: Mapping[str, Any] | None = None,
    shown: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the content of `summary.json`; its keys are in docs/reference/run_files.md.

    A lost member has no entry in `results`; its last point counts. `paths` is what the hub shows of
    the paths of a modular model, `shown` of the members: their machines, and what they sent and
    received, which the hub alone adds up over processes.
    """
    members = {name: _figures(name, results, points) for name in _members(results, points)}
    for view in shown:
        if view["member"] in members:
            members[view["member"]] |= {name: view[name] for name in OF_HUB}
    steps = max((int(m["steps"]) for m in members.values()), default=0)
    tokens = sum(int(m["tokens"]) for m in members.values())
    wall_s = max((m["wall_s"] for m in members.values()), default=0.0)
    compute_s = _mean([m["compute_s"] for m in members.values()])
    samples_given = round(sum(m["samples_given"] for m in members.values()))
    sent = _mean([m["sent_bytes"] for m in members.values()])
    parameters = _parameters(members)
    # Nothing to compare with where no member could hold the whole model.
    ddp = ddp_bytes(parameters=parameters, members=spec.job.nodes, steps=steps)
    ddp = 0 if spec.swarm.stages > 1 else ddp
    evaluations = held_out_losses(points)
    replicas = compare(results, nodes=spec.job.nodes)
    final, accuracy = _first_of(results, "loss_final"), _accuracy(results, points)
    return {
        "job": job,
        "strategy": resolve(spec.strategy).names(),
        "nodes": spec.job.nodes,
        "rounds_committed": rounds.committed,
        "rounds_aborted": rounds.aborted,
        "steps": steps,
        "tokens": tokens,
        "data": data_account.account(results, samples_given=samples_given),
        "parameters": parameters,
        "wall_s": wall_s,
        "compute_s": compute_s,
        "utilisation": compute_s / wall_s if wall_s else None,
        "loss_first": _loss_first(results, evaluations),
        "loss_final": final if final is not None else _last(evaluations),
        "accuracy": accuracy,
        "loss_unit": loss_unit(spec),
        "bytes_per_token": _first_of(results, "bytes_per_token"),
        "bytes_sent_per_node": round(sent),
        "bytes_sent_ddp_fp32": ddp,
        "reduction": ddp / sent if sent and ddp else None,
        "tokens_per_s": tokens / wall_s if wall_s else None,
        "best_single_node_tokens_per_s": _best_alone(members),
        "replicas_identical": replicas.identical,
        "replicas_note": replicas.note,
        "same_data": len({r["data_digest"] for r in results.values() if "data_digest" in r}) <= 1,
        "stopped": any(bool(result.get("stopped")) for result in results.values()),
        "seed": spec.job.seed,
        "versions": _first_of(results, "versions") or {},
        "members": list(members.values()),
        "sample": best_sample(results),
        **({"paths": paths} if paths else {}),
        **(_of_policies(spec, results, points, shown) if spec.kind == "rl" else {}),
    }


def _of_policies(
    spec: JobSpec, results: Results, points: Points, shown: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what differs for policies: they count steps, not tokens, and have no replicas."""
    sent = {view["member"]: view["sent_bytes"] for view in shown}
    rl = rl_summary(spec.rl, results=results, points=points, sent=sent)
    return {
        "rl": rl,
        "tokens": 0,
        "tokens_per_s": None,
        "best_single_node_tokens_per_s": None,
        "bytes_sent_ddp_fp32": None,
        "reduction": None,
        "replicas_identical": None,
        "replicas_note": "",
    }


def ddp_bytes(*, parameters: int, members: int, steps: int) -> int:
    """Return the bytes each member would send with a ring all-reduce of fp32 gradients per step."""
    return round(2 * (members - 1) / members * FP32_BYTES * parameters * steps)


def held_out_losses(points: Points) -> list[tuple[int, int, float]]:
    """Return (step, round, loss) of every evaluation, in order of rounds.

    Members evaluate shares, and the shares of one round are added. The final evaluation of all data
    by one member is an entry of its own.
    """
    sums: dict[tuple[int, int], list[float]] = {}
    final: list[tuple[int, int, float]] = []
    for point in points:
        values = point["values"]
        if values.get("held_out_tokens"):
            both = sums.setdefault((int(point["round"]), int(point["step"])), [0.0, 0.0])
            both[0] += values["held_out_loss_sum"]
            both[1] += values["held_out_tokens"]
        if "held_out_loss" in values:
            final.append((int(point["step"]), int(point["round"]), values["held_out_loss"]))
    shared = [(step, round_, a / b) for (round_, step), (a, b) in sorted(sums.items())]
    return shared + final


def _accuracy(results: Results, points: Points) -> float | None:
    """Return the accuracy at the end, as a member found, or all stages of a SWARM together."""
    values = [point["values"].get("held_out_accuracy") for point in points]
    measured = [float(value) for value in values if value is not None]
    found = _first_of(results, "accuracy")
    return found if found is not None else measured[-1] if measured else None


def best_sample(results: Results) -> str:
    """Return the sample of the trained model, if a member reported one."""
    return str(_first_of(results, "sample") or "")


def write_summary(folder: Path, summary: Mapping[str, Any]) -> Path:
    """Write `summary.json` into a run's folder, atomically.

    Raises:
        StorageFull: the disk is full.
    """
    text = json.dumps(dict(summary), indent=2) + "\n"
    return write_whole(folder / SUMMARY_NAME, text)


def write_whole(path: Path, text: str) -> Path:
    """Write a text file atomically.

    Raises:
        StorageFull: the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".part")
    try:
        scratch.write_text(text, encoding="utf-8", newline="\n")
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            raise StorageFull(
                f"no room for {path.name}", given=str(path), remedy="free some disk space"
            ) from error
        raise
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a `.jsonl` file; a missing file or a truncated last line gives none."""
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue  # a truncated last line: its writer was ended
    return lines


def _members(results: Results, points: Points) -> list[str]:
    names = set(results) | {str(point["member"]) for point in points}
    return sorted(names, key=lambda name: (len(name), name))


def _figures(name: str, results: Results, points: Points) -> dict[str, Any]:
    """Return one member's row, from its result or its last measurements."""
    latest: dict[str, Any] = {}
    before = dict.fromkeys(ADDED, 0.0)
    for point in points:
        if point["member"] != name:
            continue
        values = point["values"]
        if PROCESS_BEGAN in values:
            for key in ADDED:
                again = float(values.get(key, 0.0))
                before[key] += max(0.0, float(latest.get(key, 0.0)) - again)
                latest[key] = again
        latest |= {**values, "steps": point["step"], "rounds": point["round"]}
    totals = {**latest, **results.get(name, {})}
    totals |= {key: float(totals.get(key, 0.0)) + before[key] for key in ADDED}
    wall_s, tokens = float(totals.get("wall_s", 0.0)), int(totals.get("tokens", 0))
    compute_s = float(totals.get("compute_s", 0.0))
    return {
        "member": name,
        "finished": name in results,
        "steps": int(totals.get("steps", 0)),
        "rounds": int(totals.get("rounds", 0)),
        "tokens": tokens,
        "samples_given": totals["samples_given"],
        "wall_s": wall_s,
        "compute_s": compute_s,
        "utilisation": compute_s / wall_s if wall_s else None,
        "tokens_per_s": tokens / wall_s if wall_s else 0.0,
        "sent_bytes": float(totals.get("sent_bytes", 0)),
        "control_sent_bytes": int(totals.get("control_sent_bytes", 0)),
        "received_bytes": float(totals.get("received_bytes", 0)),
        "parameters": int(totals.get("parameters", 0)),
        "loss": totals.get("loss") if totals.get("loss") is not None else latest.get("loss"),
        **({"stage": int(totals["stage"])} if "stage" in totals else {}),
    }


def _best_alone(members: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the tokens per second of the fastest member that trains the whole model.

    None: there is none. A member of a SWARM computes one stage of the microbatches of all.
    """
    alone = [m["tokens_per_s"] for m in members.values() if int(m.get("stage", -1)) < 0]
    return max(alone, default=None)


def _parameters(members: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the model's size: the sum over its stages, if members have one each."""
    by_stage: dict[int, int] = {}
    whole = [int(m["parameters"]) for m in members.values() if int(m.get("stage", 0)) < 0]
    if whole:
        return max(whole)
    for member in members.values():
        stage = int(member.get("stage", 0))
        by_stage[stage] = max(by_stage.get(stage, 0), int(member["parameters"]))
    return sum(by_stage.values())


def _loss_first(results: Results, evaluations: Sequence[tuple[int, int, float]]) -> float | None:
    """Return the held-out loss before the first step."""
    tokens = sum(float(result.get("first_tokens", 0)) for result in results.values())
    if tokens:
        return sum(float(r.get("first_loss_sum", 0)) for r in results.values()) / tokens
    return evaluations[0][2] if evaluations and evaluations[0][0] == 0 else None


def _first_of(results: Results, key: str) -> Any:
    """Return the value of the first member, in slot order, that has it."""
    for name in sorted(results, key=lambda name: (len(name), name)):
        if results[name].get(key) is not None:
            return results[name][key]
    return None


def _last(evaluations: Sequence[tuple[int, int, float]]) -> float | None:
    return evaluations[-1][2] if evaluations else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
