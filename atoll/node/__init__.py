"""The agent of one machine: dials the hub, starts training processes, ships what they print."""
