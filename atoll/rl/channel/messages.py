"""Trajectories, snapshots and announcements as messages: named tensors, no pickle.

Every message has a tensor `about`: JSON with its kind and the format's version. Messages come from
other processes, maybe of another version, so shapes, types and numbers are checked before use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.errors import DataError
from atoll.rl.environments.spaces import CONTINUOUS, TaskSpec
from atoll.rl.trajectory import Trajectory

FORMAT = 1
"""Version of all messages; others are refused."""

ABOUT = "about"
SENT_AT = "sent_at"
"""Wall-clock time at which an actor sent a message, seconds since 1970."""

MAX_STEPS = 2**24
"""Largest number of steps times columns of one trajectory."""
MAX_RETURNS = 2**16

_TERMINATED, _TRUNCATED = 1, 2
_OPTIONAL = ("states", "cut_states", "hidden")
_HEADER = ("policy", "actor", "sequence", "policy_version", "value_version", "returns")
_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


def encode_trajectory(trajectory: Trajectory) -> dict[str, Tensor]:
    """Return a trajectory as a message that shares no memory with it.

    Booleans share one byte per step; discrete actions take the smallest integer type that fits.
    """
    flags = trajectory.terminated.to(torch.uint8) * _TERMINATED
    flags += trajectory.truncated.to(torch.uint8) * _TRUNCATED
    message = {
        "observations": _plain(trajectory.observations),
        "actions": _narrow(trajectory.actions),
        "log_probabilities": _plain(trajectory.log_probabilities),
        "rewards": _plain(trajectory.rewards),
        "flags": flags.cpu().contiguous(),
    }
    if len(trajectory.cut_at):
        message["cut_at"] = trajectory.cut_at.to(torch.int32).cpu().contiguous()
        message["cut_observations"] = _plain(trajectory.cut_observations)
    for name in _OPTIONAL:
        tensor: Tensor | None = getattr(trajectory, name)
        if tensor is not None:
            message[name] = _plain(tensor)
    if trajectory.scale is not None:
        message["scale"] = torch.stack([_plain(part) for part in trajectory.scale])
    header = {name: getattr(trajectory, name) for name in _HEADER}
    return with_metadata(message, "trajectory", **header)


def decode_trajectory(message: Mapping[str, Tensor], spec: TaskSpec | None) -> Trajectory:
    """Return the trajectory in a message.

    Args:
        message: The result of `encode_trajectory`.
        spec: The task of its policy, to check shapes and actions against; None if unknown.

    Raises:
        DataError: it is not a trajectory, is of another version, does not fit its task or has
            numbers that are not finite; the policy and the actor are named.
    """
    about = metadata_of(message, "trajectory")
    header = _header(about)
    who = f"policy {header['policy']}, actor {header['actor']}, trajectory {header['sequence']}"
    try:
        trajectory = _build(message, header)
        _check_bounds(trajectory, who)
        if spec is not None:
            _check_fits(trajectory, spec, who)
        return trajectory.check()
    except (
        KeyError, RuntimeError, IndexError, TypeError, ValueError, OverflowError
    ) as error:  # fmt: skip
        raise _wrong(who, f"{type(error).__name__}: {error}") from error


def with_metadata(tensors: Mapping[str, Tensor], kind: str, **facts: Any) -> dict[str, Tensor]:
    """Return a message of a kind: the tensors, and `about` with the facts."""
    text = json.dumps({"format": FORMAT, "kind": kind, **facts}, separators=(",", ":"))
    about = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return {ABOUT: about, **tensors}


def metadata_of(message: Any, kind: str) -> dict[str, Any]:
    """Return the facts in a message's `about`.

    Raises:
        DataError: the message is not of this kind, or is of another version.
    """
    try:
        about = json.loads(message[ABOUT].numpy().tobytes())
        found = (about["format"], about["kind"])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DataError(
            "a message is malformed", given=f"{type(error).__name__}: {error}"[:200],
            expected=f"a {kind} that another member sent",
        ) from error  # fmt: skip
    if found != (FORMAT, kind):
        raise DataError(
            "unexpected message",
            given=f"{found[1]!r} in format {found[0]!r}",
            expected=f"{kind!r} in format {FORMAT}",
            remedy="run the same version of atoll on all members of a pool",
        )
    return dict(about)


def without_metadata(message: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return only the tensors of a message."""
    return {name: tensor for name, tensor in message.items() if name != ABOUT}


def float_tensor(value: float) -> Tensor:
    """Return one number as a tensor."""
    return torch.tensor([value], dtype=torch.float64)


def _header(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that identify a trajectory, checked for their types."""
    kinds = {"policy": str, "actor": str, "returns": list}
    header: dict[str, Any] = {}
    for name in _HEADER:
        value, kind = about.get(name), kinds.get(name, int)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise DataError(
                "a trajectory lacks its policy or actor", given=f"{name} = {value!r}"[:200],
                expected=f"{name} as {kind.__name__}",
            )  # fmt: skip
        if kind is int and not 0 <= value < 2**62:
            raise DataError("a number of a trajectory is out of range", given=f"{name} = {value}")
        header[name] = value
    if len(header["returns"]) > MAX_RETURNS:
        raise DataError("a trajectory has too many returns", given=len(header["returns"]))
    return header


def _build(message: Mapping[str, Tensor], header: dict[str, Any]) -> Trajectory:
    observations, flags = message["observations"], message["flags"]
    actions, scale = message["actions"], message.get("scale")
    cut_at = message.get("cut_at", torch.zeros(0, 2, dtype=torch.int32))
    none = observations.new_zeros(0, *observations.shape[2:])
    for name in ("observations", "log_probabilities", "rewards", "cut_observations", *_OPTIONAL):
        if name in message and message[name].dtype != torch.float32:
            raise TypeError(f"{name} of type {message[name].dtype}, expected float32")
    if flags.dtype != torch.uint8 or actions.dtype not in (torch.float32, *_INTEGERS):
        raise TypeError(f"flags of {flags.dtype} and actions of {actions.dtype}")
    return Trajectory(
        observations=observations,
        actions=actions if actions.is_floating_point() else actions.to(torch.int64),
        log_probabilities=message["log_probabilities"],
        rewards=message["rewards"],
        terminated=(flags & _TERMINATED) != 0,
        truncated=(flags & _TRUNCATED) != 0,
        cut_at=cut_at.to(torch.int64),
        cut_observations=message.get("cut_observations", none),
        scale=None if scale is None else (scale[0], scale[1]),
        states=message.get("states"),
        cut_states=message.get("cut_states"),
        hidden=message.get("hidden"),
        **{**header, "returns": [float(n) for n in header["returns"]]},
    )


def _check_bounds(trajectory: Trajectory, who: str) -> None:
    """Refuse indices that are out of range."""
    if trajectory.rewards.ndim != 2 or not 0 < trajectory.rewards.numel() <= MAX_STEPS:
        raise _wrong(who, f"rewards of shape {tuple(trajectory.rewards.shape)}")
    cut_at, (length, columns) = trajectory.cut_at, trajectory.rewards.shape
    if cut_at.ndim != 2 or cut_at.shape[1] != 2 or len(cut_at) > trajectory.rewards.numel():
        raise _wrong(who, f"cut_at of shape {tuple(cut_at.shape)}")
    inside = (cut_at >= 0).all() and (cut_at < torch.tensor([length, columns])).all()
    if not inside or len(cut_at) != int(trajectory.truncated.sum()):
        raise _wrong(who, f"{len(cut_at)} cuts for {int(trajectory.truncated.sum())} truncations")
    if not bool(trajectory.truncated[cut_at[:, 0], cut_at[:, 1]].all()):
        raise _wrong(who, "cuts where no episode was truncated")
    if bool((trajectory.terminated & trajectory.truncated).any()):
        raise _wrong(who, "a step that both terminated and was truncated")


def _check_fits(trajectory: Trajectory, spec: TaskSpec, who: str) -> None:
    """Refuse a trajectory that networks of this task cannot take."""
    length, columns = trajectory.rewards.shape
    cuts = len(trajectory.cut_at)
    expected: dict[str, tuple[int, ...]] = {
        "observations": (length + 1, columns, *spec.observation),
        "actions": (length, columns, spec.actions.width),
        "cut_observations": (cuts, *spec.observation),
    }
    if spec.state:
        expected["states"] = (length + 1, columns, *spec.state)
        if cuts:
            expected["cut_states"] = (cuts, *spec.state)
    for name, shape in expected.items():
        tensor: Tensor | None = getattr(trajectory, name)
        found = None if tensor is None else tuple(tensor.shape)
        if found != shape:
            raise _wrong(who, f"{name} of shape {found}", f"{shape}, as its actor announced")
    if trajectory.actions.is_floating_point() != (spec.actions.kind == CONTINUOUS):
        raise _wrong(who, f"actions of {trajectory.actions.dtype}", f"{spec.actions.kind} ones")
    if spec.actions.kind != CONTINUOUS:
        sizes = torch.tensor(spec.actions.sizes)
        if bool((trajectory.actions < 0).any()) or bool((trajectory.actions >= sizes).any()):
            raise _wrong(who, "an action out of range", f"0 to {spec.actions.sizes}, exclusive")


def _wrong(who: str, given: str, expected: str = "a message of the same version") -> DataError:
    return DataError(
        "a trajectory does not fit", given=f"{who}: {given}"[:400], expected=expected,
        remedy="it was dropped and counted; nothing else is affected",
    )  # fmt: skip


def _plain(tensor: Tensor) -> Tensor:
    """Return a copy as contiguous float32 on the CPU."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def _narrow(actions: Tensor) -> Tensor:
    """Return actions in the smallest integer type that fits."""
    if actions.is_floating_point():
        return _plain(actions)
    low, high = (int(actions.min()), int(actions.max())) if actions.numel() else (0, 0)
    for dtype in _INTEGERS:
        about = torch.iinfo(dtype)
        if about.min <= low and high <= about.max:
            return actions.detach().to("cpu", dtype, copy=True).contiguous()
    raise DataError("actions are out of range", given=f"{low} to {high}")


KIND = "snapshot"


def encode_snapshot(snapshot: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a snapshot as a message that shares no memory with the network."""
    copied = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in snapshot.items()
    }
    return with_metadata(copied, KIND)


def decode_snapshot(message: object) -> dict[str, Tensor]:
    """Return the tensors of a snapshot.

    Raises:
        DataError: it is not a snapshot, or is of another version.
    """
    metadata_of(message, KIND)
    if not isinstance(message, Mapping) or not all(isinstance(t, Tensor) for t in message.values()):
        raise DataError("weights from a topic are malformed", given=type(message).__name__)
    return without_metadata(message)
