"""The last words of a member: what it has trained, or what went wrong."""

from __future__ import annotations

import logging
from typing import Any

from atoll.errors import HubError
from atoll.train.enroll import Enrolled
from atoll.train.last_words import told_error
from atoll.wire.messages import Finished

log = logging.getLogger(__name__)


def end_member(
    enrolled: Enrolled, *, error: BaseException | None, result: dict[str, Any], member: str
) -> None:
    """Tell the hub how a member has ended, and close its session.

    Args:
        enrolled: Its place in the job.
        error: What its program raised; None: it came to its end.
        result: Its part of the summary.
        member: Its name.

    Raises:
        HubError: the hub was not told, and the program did not fail by itself.
    """
    sent = enrolled.connection.link.counters.sent_control_bytes
    told = None if error is None else told_error(error, member=member).to_dict()
    words = Finished(ok=error is None, result=result | {"control_sent_bytes": sent}, error=told)
    try:
        enrolled.close(words)
    except HubError as trouble:
        if error is None:
            raise
        log.warning("the hub was not told how this ended: %s", trouble)
