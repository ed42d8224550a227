"""A small llama model's exact function inside a larger llama shape: sources, layout, encodings, files, agreement."""
