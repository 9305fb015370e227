"""What is timed: each axis of the bench is a module here that makes cases, and `rounds` measures a case."""
