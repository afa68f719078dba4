"""Communication between ranks: process groups, shared memory, sums, rendezvous, heartbeats."""
