"""The HTTP server: OpenAI's, Anthropic's and Ollama's interfaces over loaded models."""
