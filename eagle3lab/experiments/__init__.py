"""Run directories, provenance, tracking, comparison and plots."""
