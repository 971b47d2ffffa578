"""Read pickles without running them."""
