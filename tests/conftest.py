"""Its folder is put on the path, so that every test can import `builder`."""
