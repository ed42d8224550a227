"""Names to models: models.toml, references, the model hub, and what a GGUF header says before anything is loaded."""
