"""A network laboratory on one Linux machine: hosts with slow, long, lossy or broken links.

Every host is a network namespace whose `eth0` is a TAP device; one user-space switch owns the
other ends and decides when each packet goes on. Nothing of the kernel's traffic shaping is used,
so it works wherever namespaces and /dev/net/tun do, as root. May import errors only. Start
with `lab.py`; `switch.py` is the model of the network.
"""
