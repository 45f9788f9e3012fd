"""A job of two policies and their critic, played by hand as real members tell it."""

from __future__ import annotations

import io
import math
import time

from PIL import Image, ImageDraw

from atoll.wire.messages import Event, Metrics, Point
from tests.dashboard.scene import Scene
from tests.hub.peer import Peer

SPEC = """
[job]
name = "balance"
[rl]
steps = 60000
[[rl.policies]]
name = "earth"
env = "{earth}"
[[rl.policies]]
name = "moon"
env = "{moon}"
"""

CARTPOLE = "atoll.rl.environments.physics:cartpole"

EVERY = 1000
"""Environment steps between two points of an actor."""


class Learning:
    """The members of the job; `measure` lets all of them tell how they stand."""

    def __init__(self, scene: Scene, *, moon: str = CARTPOLE) -> None:
        """Submit the job and connect its members; `moon` is the second policy's environment."""
        spec = SPEC.format(earth=CARTPOLE, moon=moon)
        answer = scene.http.post("/api/jobs", json={"spec": spec})
        assert answer.status_code == 201, answer.text
        self.scene, self.job = scene, str(answer.json()["job"])
        self.critic, *self.actors = scene.start(self.job)
        self._began = time.time() - 60
        self._told = 0

    def measure(self, env_steps: int) -> None:
        """Let everybody tell, step by step, how it went until here."""
        for step in range(self._told + EVERY, env_steps + 1, EVERY):
            for slot, actor in enumerate(self.actors):
                self._point(actor, step, _actor(step, slot))
            self._point(self.critic, step // 100, _critic(step))
        self._told = env_steps

    def record(self, policy: str) -> None:
        """Leave an episode of a policy at the hub."""
        path = f"/api/jobs/{self.job}/files/episodes/{policy}.gif"
        answer = self.scene.http.put(path, content=gif())
        assert answer.status_code == 201, answer.text
        self.actors[0].request(Event("episode", f"an episode of {policy} is recorded"))

    def _point(self, member: Peer, step: int, values: dict[str, float]) -> None:
        point = Point(self._began + self._told / 2000 + step / 2000, step, 0, values)
        seq = self.scene._seq[member.session] = self.scene._seq.get(member.session, 0) + 1
        member.request(Metrics("i1", seq, [point]))


def _actor(step: int, slot: int) -> dict[str, float]:
    rise = 1.0 / (1.0 + math.exp(-(step - 15_000 - 9_000 * slot) / 5_000))
    value = 20.0 + 470.0 * rise + 12.0 * math.sin(step / 1700 + slot)
    return {
        "env_steps": step, "env_steps_per_s": 2300.0 - 400 * slot, "episodes": step / 90,
        "return": value, "return_best": 20.0 + 480.0 * rise, "updates": step / 512,
        "explained_variance": 0.9 * rise, "value_version": step // 100, "value_age_s": 0.3,
        "queue_wait_s": 0.2 * slot * step / 1000, "sent_bytes": 31.0 * step, "dropped": 0,
        "policy_loss": -0.01, "entropy": 0.69 * (1 - rise), "kl": 0.01,
    }  # fmt: skip


def _critic(step: int) -> dict[str, float]:
    return {
        "updates": step / 100, "value_version": step // 100, "trajectories": step / 256,
        "trajectories_per_s": 8.4, "value_loss": 0.02 + math.exp(-step / 15_000),
        "value_loss.earth": 0.02 + math.exp(-step / 12_000),
        "value_loss.moon": 0.03 + math.exp(-step / 20_000), "queue_depth": 1.0,
        "staleness": 0.7, "dropped": 2.0, "update_s": 0.02,
    }  # fmt: skip


def gif() -> bytes:
    """Return a short moving picture."""
    frames = []
    for angle in range(-20, 21, 5):
        frame = Image.new("RGB", (150, 100), "white")
        pen = ImageDraw.Draw(frame)
        tip = 75 + 60 * math.sin(math.radians(angle)), 80 - 60 * math.cos(math.radians(angle))
        pen.line([(75, 80), tip], fill=(202, 152, 101), width=6)
        pen.rectangle([55, 75, 95, 90], fill="black")
        frames.append(frame)
    kept = io.BytesIO()
    frames[0].save(kept, "gif", save_all=True, append_images=frames[1:], duration=60, loop=0)
    return kept.getvalue()
