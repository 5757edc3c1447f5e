"""The dashboard's pages: views in, HTML and SVG out, without HTTP, database or clock."""
