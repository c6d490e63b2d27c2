"""The command line, one file per verb, imported when that verb is used. What a verb does belongs to the rooms below."""
