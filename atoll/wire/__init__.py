"""Messages, frames and their limits, as they cross between processes. No sockets, no torch."""
