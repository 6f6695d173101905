"""The draft model: building it, its vocabulary, the TTT forward, export, and chain drafting with a cache.

Exactly one module here, `speculators_model`, imports speculators, and only when a draft is built.
"""
