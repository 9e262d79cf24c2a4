"""Segue's processes within other projects' frameworks."""
