"""Image classification on scikit-learn's handwritten digits."""

from src.tasks.vision.data import Digits
from src.tasks.vision.module import VisionModule

__all__ = ["Digits", "VisionModule"]
