"""Hold the commands and what is yours (tasks/, models/, strategies/); the machinery is in engine/."""

import sys

from src.engine.moved import Moved

sys.meta_path.insert(0, Moved())
