"""One machine's router and workers, started and watched by one command."""
