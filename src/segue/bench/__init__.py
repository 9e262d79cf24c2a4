"""The measurements that `segue bench` runs."""
