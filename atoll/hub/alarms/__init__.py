"""Knows what goes wrong and names the node: rules over facts, alarms that open and end."""
