"""The command line: one file per verb; whatever is heavy is imported inside the verb."""
