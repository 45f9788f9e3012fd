"""Plans of jobs on the machines that are there, made by a process of their own."""
