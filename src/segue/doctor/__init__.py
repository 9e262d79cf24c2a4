"""What `segue doctor` looks at: versions, devices, choices, places and the kernel."""
