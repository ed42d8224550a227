"""The controller that decides by itself: what rounds cost, what drafts win, which draft is worth its rows."""
