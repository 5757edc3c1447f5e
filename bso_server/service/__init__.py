"""The use cases: what a server can be asked to do and to tell. No HTTP here, and no SQL."""
