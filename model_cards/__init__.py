"""Model cards: what a run directory's record says, as the README.md of its checkpoint."""

from .card import build_card, write_card

__all__ = ["build_card", "write_card"]
