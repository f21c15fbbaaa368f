"""The tools around the algorithms of cleanrl/, each one file with its own command line."""
