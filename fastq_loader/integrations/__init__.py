"""Modules that make frameworks keep our loader, by the names under which users import them."""
