"""The ops: one file each, of the same name."""
