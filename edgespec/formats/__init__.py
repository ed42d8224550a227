"""Model files read without any runtime: GGUF headers and MLX folders."""
