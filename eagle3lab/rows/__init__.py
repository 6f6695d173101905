"""Conversations to rows: readers, rendering with the mask, splits, accounting."""
