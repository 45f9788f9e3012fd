"""Limits of what one side accepts from the other, and the protocol's time constants."""

from __future__ import annotations

PROTOCOL = 1
"""Version of the wire protocol, equal on both sides."""

MAX_CONTROL_BYTES = 4 * 2**20
"""Largest body of a control frame (files go over HTTP, tensors over relay frames)."""

MAX_RELAY_BYTES = 1 * 2**20 + 4096
"""Largest body of a relay frame; a chunk with its head and addresses is smaller."""

MAX_FRAME_BYTES = MAX_CONTROL_BYTES + 64
"""Largest WebSocket message that either side reads; a larger one closes the connection."""

CHUNK_BYTES = 256 * 2**10
"""Payload bytes of one relayed chunk. Small enough that a heartbeat waits at most 256 KiB behind
data (2 s at 1 Mbit/s), large enough that framing costs below 0.1 %."""

WINDOW_BYTES = 4 * 2**20
"""Relay bytes in flight from one sender to one receiver: the most that the hub buffers for the
pair. At 100 ms round trip it still fills a link of 335 Mbit/s."""

UNSENT_BYTES = 64 * 2**10
"""Unsent bytes that the kernel buffers, on systems with such a setting. Without it the kernel
buffers megabytes on a slow link, and heartbeats wait seconds behind tensors."""

HEARTBEAT_S = 2.0
"""Seconds between heartbeats of an idle session; any frame counts as a heartbeat."""

DEAD_AFTER_S = 15.0
"""Seconds of silence after which the hub considers a session dead."""

MAX_LOG_LINE = 4096
"""Characters kept of one log line."""

EXIT_LEFT = 75
"""Exit status of a process that was asked to leave before its work was done."""

EXIT_REPLACED = 76
"""Exit status of a process that lost its session to a newer incarnation."""
