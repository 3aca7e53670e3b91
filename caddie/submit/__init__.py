"""The contest's door: submission folders written and reviewed."""
