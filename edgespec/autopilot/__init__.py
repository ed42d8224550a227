"""Controllers: a fixed draft length, and the autopilot, which chooses each draft from costs and acceptance."""
