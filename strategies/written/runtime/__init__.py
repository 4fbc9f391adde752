"""The code of written files, as modules: `file_text` puts a table and a few of them into one file."""
