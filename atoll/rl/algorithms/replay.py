"""Replay of slow policies' last trajectories, so that fast policies do not dominate the critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from atoll.rl.channel.messages import decode_trajectory, encode_trajectory
from atoll.rl.trajectory import Trajectory

KEPT = 2
"""Number of newest trajectories kept of each policy."""
AT_MOST = 8
"""Most absent policies rehearsed in one update, so that its cost does not grow with the pool."""
FORGOTTEN = 100
"""Updates after which a silent policy is no longer rehearsed."""


class ReplayBuffer:
    """The newest trajectories of each policy, and when each was last learned."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._kept: dict[str, list[Trajectory]] = {}
        self._last_seen: dict[str, int] = {}
        self._learned: dict[str, int] = {}

    def absent(self, present: Sequence[Trajectory], *, update: int) -> list[Trajectory]:
        """Return trajectories of policies without new ones, the longest not learned first.

        `present` are the new trajectories of update number `update`.
        """
        here = {trajectory.policy for trajectory in present}
        names = sorted(
            (self._learned[name], name)
            for name, last_seen in self._last_seen.items()
            if name not in here and update - last_seen <= FORGOTTEN
        )[:AT_MOST]
        for _, name in names:
            self._learned[name] = update
        return [trajectory for _, name in names for trajectory in self._kept[name]]

    def keep(self, present: Sequence[Trajectory], *, update: int) -> None:
        """Add the trajectories of an update, in the order in which they were learned."""
        for name in {trajectory.policy for trajectory in present}:
            newest = [trajectory for trajectory in present if trajectory.policy == name]
            self._kept[name] = [*self._kept.get(name, []), *newest][-KEPT:]
            self._last_seen[name] = self._learned[name] = update
        for name in [n for n, seen in self._last_seen.items() if update - seen > FORGOTTEN]:
            del self._kept[name], self._last_seen[name], self._learned[name]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole state, flat."""
        state: dict[str, Tensor] = {}
        for number, name in enumerate(sorted(self._kept)):
            state[f"{number}.at"] = torch.tensor([self._last_seen[name], self._learned[name]])
            for place, trajectory in enumerate(self._kept[name]):
                for key, tensor in encode_trajectory(trajectory).items():
                    state[f"{number}.{place}.{key}"] = tensor
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`.

        Raises:
            DataError: a trajectory in it is damaged.
        """
        self._forget()
        number = 0
        while f"{number}.at" in state:
            some, place = [], 0
            while f"{number}.{place}.about" in state:
                start = f"{number}.{place}."
                message = {
                    k.removeprefix(start): v for k, v in state.items() if k.startswith(start)
                }  # fmt: skip
                some.append(decode_trajectory(message, None))
                place += 1
            name = some[0].policy
            last_seen, learned = state[f"{number}.at"].tolist()
            self._kept[name], self._last_seen[name], self._learned[name] = some, last_seen, learned
            number += 1
