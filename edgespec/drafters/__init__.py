"""What proposes drafts: one file a drafter."""
