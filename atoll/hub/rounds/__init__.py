"""Hub, rounds: the round machines of the jobs, made durable and driven by a clock.

It may import hub/db, observability, storage and jobs.
Start reading at `service.py`; the pure machine is `atoll/rounds`.
"""
