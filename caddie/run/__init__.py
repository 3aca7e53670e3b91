"""Recipe and text to a scored file and its result."""
