"""Several hosts on one machine: network namespaces with shaped uplinks, and ranks that torchrun starts in them."""
