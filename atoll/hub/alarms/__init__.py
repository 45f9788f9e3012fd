"""Hub, alarms: rules that detect faults of jobs and machines, and notifications.

It may import all sub-rooms but dashboard.
Start reading at `watch.py`, which has the table of rules.
"""
