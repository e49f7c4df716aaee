"""Stock's semi-private names, for code that reads and calls them."""
