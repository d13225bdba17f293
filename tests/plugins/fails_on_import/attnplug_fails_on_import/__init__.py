"""Its module raises what a library raises that finds no GPU."""
