"""The dashboard's pages: views in, HTML and SVG out. No HTTP here, no database and no clock."""
