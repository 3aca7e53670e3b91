"""What a run leaves, where people already look."""
