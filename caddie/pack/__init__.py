"""Trained weights to one file, and back."""
