"""A support desk for an invented shop: an order near the top of a long policy changes between turns."""
