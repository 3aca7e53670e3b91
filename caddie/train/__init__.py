"""Training against the clock."""
