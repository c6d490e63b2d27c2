"""The command line, one file for each command, imported when that command is used. What a command does belongs to the rooms below."""
