"""Contest submissions: written from runs, and reviewed, whoever wrote them."""
