"""What a job would need, found out before it runs."""
