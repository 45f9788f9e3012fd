"""Side-by-side benchmarks: one command each, the last line of output is JSON."""
