"""The command line, one file for each command, imported when that command runs; what a command does belongs in the rooms below `cli`."""
