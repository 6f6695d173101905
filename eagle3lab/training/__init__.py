"""The training loop: run plan, Lightning module and data module, optimizer, metrics, callbacks, trainer."""
