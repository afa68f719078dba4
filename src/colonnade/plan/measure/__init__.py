"""Measurements that plans are made from: this machine's memory, disks and links, the popularity of rows."""
