"""Where engines that serve are found: files, etcd or Kubernetes. A shadow that waits is in none of them."""
