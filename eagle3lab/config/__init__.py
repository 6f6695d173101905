"""Typed configuration: schema, checks, names, errors. Nothing in this room imports torch."""
