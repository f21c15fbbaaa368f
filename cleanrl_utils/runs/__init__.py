"""Run folders: what is read of them, and what is computed of many."""
