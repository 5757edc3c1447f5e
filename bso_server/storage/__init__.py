"""The database: connections, tables, transactions, and rows in and core dataclasses out."""
