"""What crosses between processes: messages, frames and their limits. No sockets, no torch."""
