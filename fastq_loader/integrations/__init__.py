"""Adapters that make frameworks keep our loader, one module for each; each works from its import on."""
