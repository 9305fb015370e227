"""What makes frameworks keep our loader, one module for each; it works from when it is imported."""
