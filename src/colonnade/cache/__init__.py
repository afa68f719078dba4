"""Copies of rows that their ranks keep: who has one, how old it is, what it has yet to tell its owner."""
