"""The MLX runtime: Apple Silicon, and the CPU builds of MLX on Linux."""
