"""eagle3lab: train, compare and measure EAGLE-3 draft models for a production verifier."""

__version__ = "0.1.0"
