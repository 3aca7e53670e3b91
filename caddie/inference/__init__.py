"""Use of an artifact: sampling text and compressing text."""
