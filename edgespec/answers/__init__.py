"""Requests and answers as chat interfaces have them: messages, tools, reasoning, usage."""
