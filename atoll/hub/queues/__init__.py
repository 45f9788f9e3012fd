"""The hub's durable queues and topics: put, lease, acknowledge, dead letters.

May import: atoll.hub.db; its handlers also jobs, security and sessions; atoll.wire, the leaves.
Start in queues.py (what holds for every queue), then sqlite.py or nats.py (where items are).
"""
