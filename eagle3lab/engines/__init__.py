"""The ways to run a verifier, behind one small interface: capture states, generate, decode with a draft."""
