"""The Hugging Face hub: references, files, downloads, the cache."""
