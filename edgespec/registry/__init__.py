"""From names to models: models.toml, resolution of references, models of other programs, tokenizer compatibility."""
