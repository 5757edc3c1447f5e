"""The parts of a release, and their checks: changelog, packages, licences, bill of materials."""
