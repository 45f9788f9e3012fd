"""The process that writes the checkpoints of one trainer.

Started as `python -m atoll.checkpoint.background.writer`.

It imports no torch, runs at low priority and ends with its trainer: when the pipe closes, and on
Linux also by a kernel signal. It ignores signals to its process group, because the trainer still
has a last checkpoint to write then.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from atoll.checkpoint.background.child import Reporter, lower_priority
from atoll.checkpoint.background.messages import (
    Delivered,
    Failed,
    FolderTarget,
    HubTarget,
    Ready,
    WriteOrder,
    WriterSetup,
    Written,
    read_command,
)
from atoll.checkpoint.files import Moment, unobserved
from atoll.checkpoint.shared_memory import Region
from atoll.checkpoint.stores.folder import Folder, PartFile
from atoll.errors import AtollError, CheckpointError, HubUnreachable
from atoll.wire.retention import Keep

if TYPE_CHECKING:
    from atoll.checkpoint.background.copies import Copier


class Superseded(Exception):
    """A newer order arrived while this one waited for the hub."""


class Writer:
    """Executes orders one after the other.

    Args:
        setup: Where checkpoints go.
        orders: The orders.
        reporter: Sends reports.
        moment: Called at every point of a write; for tests.
    """

    def __init__(
        self,
        setup: WriterSetup,
        orders: queue.Queue[WriteOrder],
        *,
        reporter: Reporter,
        moment: Moment = unobserved,
    ) -> None:
        self._target = setup.target
        self._orders = orders
        self._report = reporter
        self._moment = moment
        self._give_up_at = 0.0
        self._copier: Copier | None = None
        if isinstance(self._target, FolderTarget) and self._target.to:
            from atoll.checkpoint.background.copies import CheckpointCopies, Copier

            target = self._target
            copies = CheckpointCopies(Path(target.folder), target.to, job=target.job, moment=moment)
            self._copier = Copier(copies, report=reporter)

    def serve(self) -> None:
        """Execute orders forever."""
        if self._copier is not None:
            self._copier.wake()
        while True:
            self.carry_out(self._orders.get())

    def carry_out(self, order: WriteOrder) -> None:
        """Write one checkpoint and report the result."""
        began = time.monotonic()
        try:
            with _mapped(order.regions) as views:
                if isinstance(self._target, HubTarget):
                    published = self._upload(self._target, order, views)
                else:
                    published = self._write(self._target, order, views)
        except Superseded:
            gone = HubUnreachable(
                "a checkpoint was dropped for a newer one while the hub did not answer",
                given=f"round {order.round}",
            )
            self._report(Failed(order.number, gone.to_dict(), superseded=True))
        except AtollError as error:
            self._report(Failed(order.number, error.to_dict()))
        except OSError as error:
            wrong = CheckpointError(
                f"the checkpoint of round {order.round} cannot be written", given=str(error)
            )
            self._report(Failed(order.number, wrong.to_dict()))
        else:
            nbytes = sum(region.nbytes for region in order.regions)
            self._moment("written")
            self._report(Written(order.number, published, nbytes, time.monotonic() - began))
            if published and self._copier is not None:
                self._copier.wake()

    def _write(self, target: FolderTarget, order: WriteOrder, views: dict[str, memoryview]) -> bool:
        folder = Folder(
            Path(target.folder),
            job=target.job,
            keep=Keep(newest=target.keep, every=target.keep_every, best=target.keep_best),
            versions=order.versions,
            moment=self._moment,
        )
        files = [PartFile(name, lambda view=view: [view]) for name, view in views.items()]  # type: ignore[misc]
        return folder.put(
            order.round, files, stamp=order.stamp, step=order.step, members=order.members
        )

    def _upload(self, target: HubTarget, order: WriteOrder, views: dict[str, memoryview]) -> bool:
        """Upload the parts; the hub informs the trainer once the checkpoint is complete."""
        # The HTTP library takes as long to import as everything else: load it only when needed.
        from atoll.checkpoint.stores.upload import Upload
        from atoll.net.endpoint import HubEndpoint

        self._give_up_at = time.monotonic() + target.retry_s
        upload = Upload(
            target.url,
            token=target.token,
            endpoint=HubEndpoint(
                ca=target.ca, proxy=target.proxy, upload_bps=target.upload_bps, pace=target.pace
            ),
            job=target.job,
            line=target.line,
            pause=self._pause,
            moment=self._moment,
        )
        with contextlib.closing(upload):
            for name, view in views.items():
                held = upload.put(order.round, name, view)
                self._report(Delivered(order.number, name, held.sha256, held.nbytes))
        return False

    def _pause(self, pause_s: float) -> None:
        """Wait before the hub is tried again.

        Raises:
            Superseded: a newer order is waiting.
            HubUnreachable: it has not answered for too long.
        """
        deadline = time.monotonic() + pause_s
        while (left_s := deadline - time.monotonic()) > 0:
            if not self._orders.empty():
                raise Superseded
            time.sleep(min(left_s, 0.1))
        if time.monotonic() > self._give_up_at:
            raise HubUnreachable(
                "the hub did not answer, so a checkpoint was not saved there",
                remedy="check that the hub runs; training continues to the next checkpoint",
            )


def run(commands: BinaryIO, reports: BinaryIO, *, moment: Moment = unobserved) -> None:
    """Read the setup, then execute orders; the process ends when the commands do."""
    reporter = Reporter(reports)
    setup = read_command(commands.readline())
    if not isinstance(setup, WriterSetup):
        raise CheckpointError("the writer of checkpoints received no setup")
    orders: queue.Queue[WriteOrder] = queue.Queue()

    def listen() -> None:
        for data in commands:
            command = read_command(data)
            if isinstance(command, WriteOrder):
                orders.put(command)
        os._exit(0)  # the trainer has ended or closed: unfinished work is not needed

    writer = Writer(setup, orders, reporter=reporter, moment=moment)
    threading.Thread(target=listen, name="commands", daemon=True).start()
    reporter(Ready(os.getpid()))
    writer.serve()


@contextlib.contextmanager
def _mapped(regions: list[Region]) -> Iterator[dict[str, memoryview]]:
    """Map the bytes of each part, read only, for the block."""
    mappings = []
    try:
        for region in regions:
            descriptor = region.descriptor
            if descriptor < 0:
                descriptor = os.open(region.path, os.O_RDONLY)
            length = region.offset + region.nbytes
            mappings.append(mmap.mmap(descriptor, length, access=mmap.ACCESS_READ))
            if region.descriptor < 0:
                os.close(descriptor)
        yield {
            region.name: memoryview(mapping)[region.offset :]
            for region, mapping in zip(regions, mappings, strict=True)
        }
    finally:
        for mapping in mappings:
            # After an error its traceback still holds views; the memory is freed with them.
            with contextlib.suppress(BufferError):
                mapping.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    run(*lower_priority())
