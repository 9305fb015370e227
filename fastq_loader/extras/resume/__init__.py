"""`StatefulDataLoader`: stop a run in the middle of an epoch, and resume it."""
