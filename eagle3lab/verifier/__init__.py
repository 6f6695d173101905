"""The verifier as files: facts from its configuration, layer ids, edge weights, the embedded default."""
