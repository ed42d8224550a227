"""Earlier texts as tokens, on disk and in memory, and what followed the end of a text in them."""
