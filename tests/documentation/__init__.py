"""Reads the documentation: its blocks, its commands, its links."""
