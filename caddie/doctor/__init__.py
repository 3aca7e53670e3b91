"""Examine a machine before a run: its hardware, what would slow a run down, and an estimate for a recipe."""

from caddie.doctor.examination import Examination, examine
