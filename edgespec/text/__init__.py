"""Text around tokens: chat templates, streaming detokenization, stop strings, reasoning blocks."""
