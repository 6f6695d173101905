"""Acceptance by real speculative decoding; statistics and comparison."""
