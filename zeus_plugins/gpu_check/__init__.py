"""The first hour on a real GPU, as one command: do its figures mean what they say? Changes no setting.

`examine` looks at each visible NVIDIA GPU, at rest and under load, and says of each thing what was expected and found.
"""
