"""Conversations to a hidden-state store: rows, engine, alignment self-test, shards."""
