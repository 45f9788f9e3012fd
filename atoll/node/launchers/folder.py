"""The folder of one process: the job file, the job's files, and the worker's environment."""

from __future__ import annotations

import errno
import platform
from pathlib import Path

from atoll import config
from atoll.errors import ConfigError, JobError, StorageFull
from atoll.net.endpoint import HubEndpoint
from atoll.node.processes.exits import ERROR_FILE
from atoll.node.processes.files import replace_text
from atoll.wire.messages import Launch


def lay_out(
    command: Launch, *, directory: Path, hub: str, endpoint: HubEndpoint, device: str = "",
    hub_only: bool = False,
) -> dict[str, str]:  # fmt: skip
    """Write the job file and the user's files; return ATOLL_* for the process.

    `device` is where it is to compute; empty: as the job says. With `hub_only` a variable says that
    it reaches nothing but the hub.

    Raises:
        ConfigError: a file's name points outside the folder.
        StorageFull: the disk of this machine has no room.
        JobError: the folder cannot be written for another reason.
    """
    for name in command.files:
        if Path(name).name != name:
            raise ConfigError(
                "a file of the job has an unsupported name",
                given=repr(name),
                expected="a file name without a folder",
            )
    spec_path = directory / "job.toml"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # the job may have secrets
        (directory / ERROR_FILE).unlink(missing_ok=True)
        for name, text in command.files.items():
            replace_text(directory / name, text)
        replace_text(spec_path, command.spec)
    except OSError as error:
        kind = StorageFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else JobError
        raise kind(
            "the folder of a process cannot be written",
            given=f"{directory} on {platform.node()} ({error.strerror or error})",
            remedy="check the disk space and permissions of that machine",
        ) from error
    worker = config.WorkerEnvironment(
        hub=hub,
        token=command.token,
        job=command.job,
        member=command.member,
        directory=directory.resolve(),
        spec=spec_path.resolve(),
        ca=endpoint.ca,
        proxy=endpoint.proxy,
        upload_bps=endpoint.upload_bps,
        download_bps=endpoint.download_bps,
        device=device,
        pace=endpoint.pace,
        hub_only=hub_only,
    )
    return config.worker_variables(worker)
