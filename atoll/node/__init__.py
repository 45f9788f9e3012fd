"""The agent of one machine: connects to the hub, starts processes of jobs, ships their output.

May import config, wire, code, net and, to run the processes that it starts, island, checkpoint,
plan, train, run, rl and devices; never hub. Start reading at `agent/agent.py`; a process of a job
starts in `worker.py`.
"""
