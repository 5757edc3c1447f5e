"""Policy `zeus`: arm elimination, then Thompson sampling (You, Chung, Chowdhury: Zeus, NSDI '23)."""
