"""What is in a data set and what training would make of it, see tools/check_shards.py."""
