"""How members come to agree."""
