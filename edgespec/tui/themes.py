"""A theme in addition to those of Textual."""

from __future__ import annotations

from textual.theme import Theme

HIGH_CONTRAST = Theme(
    name="high-contrast",
    primary="#ffff00",
    secondary="#00ffff",
    accent="#00ffff",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#000000",
    boost="#1a1a1a",
    success="#00ff00",
    warning="#ffff00",
    error="#ff6060",
    dark=True,
    variables={"text-muted": "#ffffff", "footer-key-foreground": "#ffff00", "border": "#ffffff"},
)
