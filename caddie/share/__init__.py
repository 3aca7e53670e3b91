"""Share a run: push it to the hub and pull it, export it, track it, and let other programs score it."""
