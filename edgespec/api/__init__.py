"""The Python interface: load a model, generate, stream, chat. `import edgespec` re-exports it."""
