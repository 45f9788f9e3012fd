"""Hub, alarms: rules that detect faults of jobs and machines, and notifications.

It may import every subpackage of the hub but dashboard.
Start reading at `watch.py`, which has the table of rules.
"""
