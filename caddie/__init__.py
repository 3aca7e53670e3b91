"""caddie."""
