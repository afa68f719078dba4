"""Towers: which features stand together, where their tables lie, what that saves."""
