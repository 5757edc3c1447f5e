"""Charts as SVG, from views; pure.

Across, places are shares of the width and down they are pixels, so that one drawing fits every screen and its text
keeps its size. Colours, and what is left out where it is narrow, are the stylesheet's.
"""
