"""A target, its drafts and their sessions behind one generator of events."""
