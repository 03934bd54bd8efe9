"""Where the repository lies, for tests that read its files or start programs in it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
