"""Every recipe, each a small diff on a base, and what is known of each technique."""
