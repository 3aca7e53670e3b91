"""Contest submissions: written from runs, and checked, ours or not."""
