"""Using a file: sampling and compressing text."""
