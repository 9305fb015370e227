"""Features around the core, one room each; the core works without them."""
