"""The table of rules."""

from __future__ import annotations

from atoll.hub.alarms import loss_rules, machine_rules, member_rules, work_rules
from atoll.hub.alarms.finding import Rule

RULES = (
    Rule(kind="zero-contribution", find=member_rules.zero_contribution, holds_s=5, gone_s=30),
    Rule(kind="loss-flat", find=loss_rules.loss_flat, holds_s=120, gone_s=120),
    Rule(kind="loss-diverging", find=loss_rules.loss_diverging, holds_s=20, gone_s=60),
    Rule(kind="loss-not-finite", find=loss_rules.loss_not_finite, holds_s=0, gone_s=60),
    Rule(kind="update-outlier", find=member_rules.update_outlier, holds_s=5, gone_s=60),
    Rule(kind="replica-mismatch", find=member_rules.replica_mismatch, holds_s=0, gone_s=60),
    Rule(kind="straggler", find=member_rules.straggler, holds_s=10, gone_s=30),
    Rule(kind="stale", find=member_rules.stale, holds_s=30, gone_s=15),
    Rule(
        kind="flapping-link", find=machine_rules.flapping_link, holds_s=0, gone_s=120,
        of_nodes=True,
    ),
    Rule(
        kind="disk-filling", find=machine_rules.disk_filling, holds_s=30, gone_s=60, of_nodes=True
    ),
    Rule(
        kind="memory-filling", find=machine_rules.memory_filling, holds_s=60, gone_s=60,
        of_nodes=True,
    ),
    Rule(kind="clock-skew", find=machine_rules.clock_skew, holds_s=20, gone_s=60, of_nodes=True),
    Rule(
        kind="version-mismatch", find=machine_rules.version_mismatch, holds_s=0, gone_s=10,
        of_nodes=True,
    ),
    Rule(kind="node-lost", find=machine_rules.node_lost, holds_s=0, gone_s=5, of_nodes=True),
    Rule(kind="job-failed", find=work_rules.job_failed, holds_s=0, gone_s=0),
    Rule(kind="queue-full", find=work_rules.queue_full, holds_s=10, gone_s=30),
)  # fmt: skip
"""Every kind of alarm. Times were chosen so that what cures itself is not told: a blip of a link,
one slow round, one noisy loss. docs/alarms.md says them to people."""

KINDS = tuple(rule.kind for rule in RULES)
