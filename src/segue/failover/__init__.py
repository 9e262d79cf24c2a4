"""Engines that can take each other's place, and the lock that decides which one of them serves."""
