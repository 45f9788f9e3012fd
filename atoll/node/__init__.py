"""The agent of one machine: connects to the hub, starts processes of jobs, ships their output."""
