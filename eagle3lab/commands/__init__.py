"""The commands of `python -m eagle3lab`: they parse, call the rooms and print."""
