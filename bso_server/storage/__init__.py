"""Database: connections, transactions, tables, and the conversion of rows to dataclasses of the core."""
