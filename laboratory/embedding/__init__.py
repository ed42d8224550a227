"""A small llama model embedded in a larger shape: see laboratory.cost_faithful."""
