"""The doctor: what is on this machine, what would slow a run down, and whether a recipe is worth starting here."""

from caddie.doctor.examination import Examination, examine

__all__ = ["Examination", "examine"]
