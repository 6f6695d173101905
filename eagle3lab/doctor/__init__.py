"""Is this machine, this verifier and this store fit for a run? Layers of checks, each naming its remedy."""
