"""Finds models by name: models.toml, resolution of references, models of other programs, tokenizer compatibility."""
