"""The hidden-state store: a directory that says what it holds, written shard by shard, read by slices."""
