"""What `segue bench` runs."""
