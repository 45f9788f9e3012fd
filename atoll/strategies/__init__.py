"""How a step is computed (inner) and how members come to agree (outer)."""
