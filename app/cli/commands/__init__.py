"""The commands, one file each, imported when it is called.

``command`` of a file is its function, or a Typer with commands of its own; its name and the line that ``--help`` shows
stand in ``app.cli.program``.
"""
