"""Documents to tokens."""
