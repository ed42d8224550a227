"""The module of the distribution, imported from its folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "edgespec-automaton"))
