"""Reading results, and showing them."""
