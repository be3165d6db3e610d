from __future__ import annotations

import sys
from pathlib import Path

# The toys are also the worker processes' modules, so they are found by name and not through this package.
sys.path.insert(0, str(Path(__file__).parent))
