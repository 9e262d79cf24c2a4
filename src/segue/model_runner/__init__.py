"""Runs one step of a batch on a device."""
