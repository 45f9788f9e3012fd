"""The second lock: what the owner of this machine does not allow is refused, whoever asks.

The hub places jobs by the offers of nodes and so should not ask for it. A hub that is wrong,
or was taken over, gets no further than this.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.config import JobSpec
from atoll.errors import ConfigError, NotAllowed
from atoll.ids import is_reducer
from atoll.node.launchers.mounts import Mount, parse_mounts
from atoll.wire.messages import Offer


def check_allowed(
    spec: JobSpec, *, member: str, offer: Offer, trusted_keys: Sequence[str] = ()
) -> list[Mount]:
    """Return the mounts of a process; refuse one that the owner's offer does not cover.

    A reducer is Atoll's own program, whatever the job is, and always allowed.

    Args:
        spec: The job.
        member: Which process of it.
        offer: What the owner gives.
        trusted_keys: Public keys of those whose images the owner trusts.

    Raises:
        NotAllowed: the kind of job, its image or a mount is not covered.
        ConfigError: a mount is written wrongly, or the parts of the job contradict each other.
    """
    if is_reducer(member):
        return []
    kind = spec.trust
    if kind == "container" and kind not in offer.kinds and "signed" in offer.kinds:
        from atoll.node.signatures import check_image

        check_image(spec.launch.image, signature=spec.launch.signature, trusted_keys=trusted_keys)
    elif kind not in offer.kinds:
        raise NotAllowed(
            f"this machine does not run jobs of the kind {kind!r}",
            expected=f"one of {', '.join(offer.kinds)}" if offer.kinds else "no job at all",
            remedy="run it on another node ([job] on), or ask the owner to change the policy",
        )
    mounts = parse_mounts(spec.launch.mounts, allowed=offer.mounts)
    if kind == "container" and spec.job.requirements:
        raise ConfigError(
            "a container brings its own packages",
            given=f"requirements = {spec.job.requirements!r}",
            expected="an image that contains what the job needs",
            remedy="leave requirements out of [job], or build them into the image",
        )
    if kind != "container" and spec.launch.mounts:
        raise ConfigError(
            "mounts are for containers only",
            given=f"mounts = {spec.launch.mounts}",
            remedy='set launcher = "container" and an image in [launch], or leave mounts out',
        )
    return mounts
