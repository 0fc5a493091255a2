"""Byte-level language modelling on Python's own source code, or on any folder of text files."""

from src.tasks.language.data import TextBytes
from src.tasks.language.module import LanguageModule

__all__ = ["LanguageModule", "TextBytes"]
