"""With this folder on PYTHONPATH every Python that starts has a rehearsed GPU, those that a command starts, too."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))

import rehearsal

rehearsal.install()
