"""Several processes that are one member of a job: where each is, and how the first leads them."""
