"""Which copies are here already? Their currency, eviction, status and upkeep."""
