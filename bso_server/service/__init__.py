"""The use cases of a server, without HTTP and SQL."""
